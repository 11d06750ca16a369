"""Rank 0's report of each step: a line of metrics.jsonl, the progress bar.

The device's own times of a step are known one step later (`trainer.step.loop`), and so its line is written then.
Nothing else waits for them: the progress shows a step at once. Before a checkpoint, a validation or a sampling all
lines are written; if training fails, the last ones are written without these times.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import isnan, nan
from types import TracebackType
from typing import Self

from diffusionpipe.costs.noise import SCALE, SQUARE, TRACE, measurements_of, noise_scale
from diffusionpipe.runtime.machine.occupied_memory import PEAK, occupied_memory
from diffusionpipe.trainer.course.run_state import RunState
from diffusionpipe.trainer.data.batches.patch_order import PatchOrder
from diffusionpipe.trainer.data.order import num_epochs
from diffusionpipe.trainer.data.scan.skipped import count_skipped
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.reporting.rank_memory import RankMemory
from diffusionpipe.trainer.step.step_result import StepResult, StepTimes
from diffusionpipe.units import Seconds


class StepReports:
    """A context that reports each step to the progress bar and to metrics.jsonl, on rank 0.

    A line of metrics.jsonl is written when the step's device times are known.
    """

    def __init__(
        self, state: RunState, take_times: Callable[[], Sequence[StepTimes]], used: RankMemory | None = None
    ) -> None:
        """Takes the run's state and the sources of times; writes nothing yet.

        `take_times`: returns the times of steps that have become known since its last call. `used`: a record of this
        rank's memory, which gets a note for each step.
        """
        self._state, self._take_times, self._used = state, take_times, used
        self._waits: dict[int, Seconds] = {}
        self._untimed: deque[tuple[StepResult, Seconds, dict[str, float]]] = deque()
        """Each with its wait for the batch and the memory that was in use after it."""
        self._bubble: dict[str, float] = {}
        """The last bubble that is known, under the names of the metrics."""
        self._noise: list[tuple[float, float]] | None = None
        """The measurements of the gradient noise scale, with those before a resumed run's start; None: none is made."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.write(())  # a failed step may have left results whose times are known
        while self._untimed:
            self._write(StepTimes(step=self._untimed[0][0].step, iteration=nan, bubble=nan))

    def waited(self, step: int, seconds: Seconds) -> None:
        """Notes that step `step`, counted from 1, waited `seconds` for its batch."""
        self._waits[step] = seconds

    def write(self, results: Sequence[StepResult]) -> None:
        """Shows the results of these steps at once, and writes metrics of steps whose times are known now, in order."""
        times = self._take_times()
        memory = occupied_memory(self._state.session.job.device)
        if self._used is not None and results:
            self._used.note(results[-1].step, memory)
        if self._state.progress is None:  # only rank 0 reports; the others note their memory
            return
        # Waits by step: without a flush, results come some steps after the wait of their step.
        fresh = [(result, self._waits.pop(result.step) + result.waited, memory) for result in results]
        self._untimed += fresh
        for one in times:
            self._write(one)
        peak = {PEAK: memory[PEAK]} if PEAK in memory else {}
        for result, waited, _ in fresh:
            values = {
                "loss": result.loss,
                "epoch": self._epoch(result.step),
                **self._rate(result.seconds + waited),
                **self._bubble,
                **peak,
            }
            self._state.progress.update(result.step - 1, values)

    def _epoch(self, step: int) -> float:
        """The passes over the training data that are done after `step` steps, to four digits after the point."""
        dataset, batch = self._state.data.train.dataset, self._state.session.plan.batch
        return round(num_epochs(step * batch, len(dataset.samples), dataset.growth), 4)

    def _rate(self, step_s: Seconds) -> dict[str, float]:
        return {"step_s": step_s, "samples_per_s": self._state.session.plan.batch / step_s}

    def _write(self, times: StepTimes) -> None:
        """Writes the metrics of the oldest step that has no line yet; `times` are the step's times."""
        result, waited, memory = self._untimed.popleft()
        assert result.step == times.step, (result.step, times.step)
        assert self._state.metrics is not None, "rank 0 has metrics and progress"
        # The host may issue a step in less time than the device needs for it.
        seconds = result.seconds if isnan(times.iteration) else max(result.seconds, times.iteration)
        self._bubble = {} if isnan(times.bubble) else {"bubble": times.bubble}
        self._state.metrics.write(
            result.step,
            {
                "loss": result.loss,
                "epoch": self._epoch(result.step),
                "gradient_norm": result.gradient_norm,
                "learning_rate": result.learning_rate,
                **({} if result.distance_rate is None else {"learning_rate_times_d": result.distance_rate}),
                **{key: value for one in result.backbones for key, value in one.numbers().items()},
                **self._rate(seconds + waited),
                "bubble": times.bubble,
                "data_s": waited,
                "iteration_s": times.iteration,
                "update_s": seconds - times.iteration,
                **memory,
                **self._noise_numbers(result),
                **({"amended": 1.0} if result.is_amended else {}),
                **({"skipped_step": 1.0} if result.is_skipped else {}),
                **_skipped(self._state, result.step),
                **_patch(self._state, result.step),
            },
        )

    def _noise_numbers(self, result: StepResult) -> dict[str, float]:
        """The step's measurement of the gradient noise scale, and the scale once it is known, by metrics' names."""
        if result.noise is None:
            return {}
        if self._noise is None:
            # With the measurements of the run before it was resumed: the scale is a mean over many steps.
            self._noise = measurements_of(read_metrics(self._state.session.recipe.run.folder))
        self._noise.append(result.noise)
        scale = noise_scale(self._noise)
        known = {SCALE: scale} if scale is not None else {}
        return {SQUARE: result.noise[0], TRACE: result.noise[1], **known}


def _skipped(state: RunState, step: int) -> dict[str, float]:
    """The number of samples until this step whose pictures could not be decoded, by its name in the metrics.

    Empty where such pictures are errors.
    """
    if state.data.train.skipping is None:
        return {}
    return {"skipped_samples": float(count_skipped(state.session.recipe.run.folder, step))}


def _patch(state: RunState, step: int) -> dict[str, float]:
    """The side of the step's patches in pixels, by its name in the metrics; empty for a recipe without patches."""
    order = state.data.sizes.order if state.data.sizes is not None else None
    return {"patch": float(order.side_at(step - 1))} if isinstance(order, PatchOrder) else {}

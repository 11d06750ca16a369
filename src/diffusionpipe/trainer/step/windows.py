"""The steps of a training without a flush.

    window        forwards and backwards of several batches | each stage: clip, step, average, as soon as it can
    at its end    start the sum over all ranks of norm, loss and votes; wait for the one of some windows before
    one later     the device's times of the window: it has passed it by then, so that the host does not wait for it

The sum is not waited for at once, because ranks reach the end of a window at different times: that would be a flush. So
results come some windows late. Work that needs weights that belong together (validation, pictures, checkpoints) happens
where the pipeline is flushed: no batch after the flush begins before it. The flushes are known beforehand. A vote to
stop or to save sets another one, after all batches that may have begun.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from diffusionpipe.ir import Op, Phase
from diffusionpipe.ir.versions import batches_held
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.runtime.recording.trace import Recording
from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.trainer.optim.gradient_norm import clip_factor, scale
from diffusionpipe.trainer.optim.lookahead import predict
from diffusionpipe.trainer.optim.optimizer import set_learning_rates
from diffusionpipe.trainer.optim.staleness_rates import factor_at, fading_staleness
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.host_sum import HostSum
from diffusionpipe.trainer.step.not_finite import NamesOf, bad_positions, not_finite
from diffusionpipe.trainer.step.step_result import StepResult, StepTimes
from diffusionpipe.trainer.step.stopping import Decision, Stopping
from diffusionpipe.trainer.step.trained_backbone import BackboneResult, trained_backbone
from diffusionpipe.units import Seconds

NO_DECISION = Decision(saves=False, stops=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The time of this rank's device for a window, and the fraction of it in which the device computed."""

    step: int
    """The number of the window's step, counted from 0."""
    busy: float
    """The fraction of the window in which the device computed."""
    iteration: Seconds
    """The time of the window without the device's part of the wait for the batches that begin in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A window that has run and whose sum over all ranks has begun, but is not yet read."""

    step: int
    """The number of the window's step, counted from 0."""
    before: _Times | None
    """The times of the window before, if their busy fraction is in the sum."""
    bad: Callable[[BackboneResult], tuple[int, ...]]
    """Returns the positions of this rank's samples whose loss is not finite."""
    sum: HostSum
    """Sums of the squared norm, the loss, the busy fraction of the window before, and votes to save and to stop.

    The votes to draw are its further number.
    """
    waited: Seconds
    """The host's wait for the batches that begin in the window."""
    seconds: Seconds
    """The host's time for the window, without its wait for these batches."""


class WindowStepper:
    """Runs the steps of a training without flushes on one rank, in place of `trainer.step.loop.Stepper`."""

    def __init__(
        self,
        session: Session,
        stopping: Stopping,
        names_of: NamesOf,
        batches: Iterator[dict[str, Tensor]],
        is_flush: Callable[[int], bool],
    ) -> None:
        """Connects the steps to the session's window, whose updates and predictions it makes from then on.

        Args:
            session: this rank's session.
            stopping: collects this rank's votes to save, stop and draw.
            names_of: returns the names of samples.
            batches: the raw inputs of the samples that this rank encodes, step by step.
            is_flush: whether the pipeline is flushed after this number of steps; True where the training ends.
        """
        assert session.worker.window is not None
        self._session, self._stopping, self._names_of, self._is_flush = session, stopping, names_of, is_flush
        self._batches, self._window = batches, session.worker.window
        (self._trained,) = (trained_backbone(session, backbone) for backbone in session.model.backbones)
        self._window.update = self._update
        self._window.predict = self._predict
        self._staleness = fading_staleness(session.recipe.learning_rate.by_staleness, session.plan.train)
        self._squares = torch.zeros((), dtype=torch.float64, device=session.job.device)
        self._delay = batches_held(session.plan.train) - 1
        """The number of windows between the start of a sum and the wait for it; no rank is as late as this."""
        self._base: int | None = None
        self._stop = 0
        self._pending: deque[_Window] = deque()
        self._broken: tuple[int, BackboneResult, tuple[int, ...]] | None = None
        self._decision = NO_DECISION
        self._untimed: tuple[int, Recording] | None = None
        """The last window, until its times are read."""
        self._times: list[StepTimes] = []
        self._waited: Seconds = 0.0
        """The wait for data in the window under way, in seconds."""

    def phases(self) -> tuple[Phase, ...]:
        """Always (): there is no phase between two windows, because stages update within them."""
        return ()

    def step(self, step: int, _: dict[str, Tensor]) -> list[StepResult]:
        """Run the window of step `step`, counted from 0, and return the results that are settled now, in order.

        Raises:
            NonFiniteLossError: on all ranks, after the flush that follows the step; names the step and the samples.
            PeerError: another rank died.
        """
        # The executor counts batches from the step at which this process began.
        if self._base is None:
            self._base = step
        started, number = perf_counter(), step - self._base
        # The pipeline is empty: the next stretch ends at the next flush. Its end must be known before its batches
        # begin.
        if number == self._stop:
            self._stop = next(later - self._base for later in count(step + 1) if self._is_flush(later))
        self._waited = 0.0
        self._session.worker.reset_gradients()
        outputs = self._window.run(self._stop, self._feed)
        self._pending.append(self._start_sum(step, outputs, started))
        settled = []
        # Other ranks may be `_delay` windows later; waiting for a younger sum would be a flush. At a flush all are
        # waited for.
        while len(self._pending) > self._delay or (self._pending and self._window.batch == self._stop):
            settled.append(self._settle(self._pending.popleft()))
        if self._window.batch < self._stop:
            # A drawing waits for the next flush: one flush more would change the training.
            if (self._decision.saves or self._decision.stops or self._broken) and settled:
                # Batches up to there may have begun on some rank.
                self._stop = min(self._stop, self._window.batch + self._session.plan.train.lead)
            # Weights of stages belong together only at a flush, so the decision waits for it.
            return [replace(result, decision=NO_DECISION) for result in settled]
        decision, self._decision = self._decision, NO_DECISION
        if self._broken is not None:
            # The results of this call are lost with the error, and times of steps without a result are not reported.
            self._times = [one for one in self._times if one.step < settled[0].step]
            raise not_finite(self._session, self._broken[0], self._names_of, *self._broken[1:], self._consequence(step))
        self.finish_times()
        return [*settled[:-1], replace(settled[-1], decision=decision)]

    def settle(self) -> list[StepResult]:
        """Always []: it is called only after a flush, where all steps are settled."""
        return []

    def take_times(self) -> list[StepTimes]:
        """The times of the steps that have become known since the last call, in the order of steps."""
        times, self._times = self._times, []
        return times

    def finish_times(self) -> None:
        """Sums the times of the last window before a flush over all ranks, so that `take_times` returns them too.

        Every rank calls it, and waits for its device.
        """
        times = self._own_times()
        if times is not None:
            total = HostSum(torch.zeros(0, dtype=torch.float64, device=self._session.job.device), [times.busy])
            with self._session.job.progress.waiting():
                self._note_times(times, float(total.wait()[0]))

    def _own_times(self) -> _Times | None:
        """The rank's times of the last window; None if they were taken before.

        It does not wait for the device if another window has run since.
        """
        if self._untimed is None:
            return None
        (step, recording), self._untimed = self._untimed, None
        busy, seconds = recording.busy(apart_from=Op.ENCODE)  # it waits for inputs
        return _Times(step=step, busy=busy / seconds if seconds else 0.0, iteration=seconds)

    def _note_times(self, own: _Times, busy: float) -> None:
        """Note the time of a window and its bubble; `busy`: the sum of all ranks' busy fractions."""
        bubble = 1 - busy / self._session.plan.mesh.num_ranks
        self._times.append(StepTimes(step=own.step + 1, iteration=own.iteration, bubble=bubble))

    def _consequence(self, step: int) -> str:
        return (
            f"; stages whose own gradient was not finite did not step, the others went on up to step {step + 1}, and "
            "nothing of it is saved"
        )

    def _feed(self, batch: int) -> None:
        """Hand the worker the raw inputs of a batch that is encoded next; waits for the data. `batch`: its number."""
        started = perf_counter()
        inputs = next(self._batches)
        self._waited += perf_counter() - started
        self._session.worker.feed_batch(batch, inputs)

    def _update(self, block: int, number: int) -> None:
        """Clip and step the parameters of a block, whose gradients are complete, and update the average.

        They stay as they are if a gradient is not finite. `number`: the step, counted from this process's first step.
        """
        assert self._base is not None
        step, one, session = self._base + number, self._trained, self._session
        # For the reported norm, in which each parameter counts on one rank. The norm below is this stage's own, which
        # clips.
        self._squares = sum_of_squares([p.grad for p in one.owned if p.grad is not None], session.job.device)
        gradients = [p.grad for p in one.parameters if p.grad is not None]
        own = sum_of_squares(gradients, session.job.device)
        # The host waits here for this stage's gradients. The sum over ranks shows the broken step to all later, and
        # ends the run.
        if not bool(own.isfinite()):
            return
        if one.clip_norm is not None:
            scale(gradients, clip_factor(own.sqrt(), one.clip_norm))
        set_learning_rates(session.optimizer, self._rates_at(block, step))
        if session.optimizer is not None:
            # The number of the step only rounds weights in bfloat16, which need a flush (`recipe.weights_check`).
            session.optimizer.step()
        if session.ema is not None:
            session.ema.update(step)

    def _rates_at(self, block: int, step: int) -> dict[str, float]:
        """The learning rates of a block's groups in update `step`, counted from 0."""
        rates, recipe = self._trained.rates_at(step), self._session.recipe
        fading = recipe.learning_rate.by_staleness
        # After `num_unflushed` steps each one has a flush, so no weights are old.
        if fading is None or step >= recipe.pipeline.num_unflushed(recipe.training.num_steps):
            return rates
        factor = factor_at(step, self._staleness[block], fading)
        return {group: rate * factor for group, rate in rates.items()}

    def _predict(self, block: int, version: int, number: int) -> None:
        """Move a block's parameters from the weights of a version to the values that they may have at step `number`.

        They move along the optimizer's direction. Both numbers count from this process's first step.
        """
        assert self._base is not None
        rates = [self._rates_at(block, self._base + step) for step in range(version, number)]
        for optimizer in self._session.optimizer.parts if self._session.optimizer is not None else ():
            predict(optimizer, rates)

    def _start_sum(self, step: int, outputs: list[Output], started: Seconds) -> _Window:
        """Start the sum over all ranks at the end of a window; `started`: the host's time at its begin.

        It is the sum of the squared norm, the loss, the busy fraction of the window before, and votes.
        """
        session, one = self._session, self._trained
        loss = one.sums(outputs, session.job.device)[1]
        bad = tuple(outputs)
        before = self._own_times()
        self._untimed = step, self._window.recording
        saves, stops, draws = self._stopping.votes()
        numbers = [0.0 if before is None else before.busy, saves, stops]
        return _Window(
            step=step,
            before=before,
            bad=lambda found: bad_positions(session, [one], bad, found),
            sum=HostSum(torch.stack([self._squares, loss]), numbers, further=[draws]),
            waited=self._waited,
            seconds=perf_counter() - started - self._waited,
        )

    def _settle(self, window: _Window) -> StepResult:
        session = self._session
        with session.job.progress.waiting():
            total = window.sum.wait()
        (draws,) = map(int, window.sum.further())
        *_, busy, saves, stops = total.tolist()
        if window.before is not None:
            self._note_times(window.before, busy)
        result = self._trained.result(window.step, total[:2], session.plan.batch)
        # The first broken step is the cause; the ones after it may follow from it.
        if not (isfinite(result.loss) and isfinite(result.norm)) and self._broken is None:
            self._broken = window.step, result, window.bad(result)
        self._decision = self._decision.joined(self._stopping.decision((int(saves), int(stops), draws)))
        return StepResult(
            step=window.step + 1,
            loss=result.loss,
            gradient_norm=result.norm,
            learning_rate=result.learning_rate,
            backbones=(result,),
            seconds=window.seconds,
            waited=window.waited,
            decision=NO_DECISION,
        )

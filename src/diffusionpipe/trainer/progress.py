"""How far the training is: a bar on a terminal, otherwise a line in the log now and then. Rank 0 shows it."""

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

SMOOTHING = 0.05
"""Weight of the newest step in the mean time of a step."""


class TrainingProgress:
    """Steps done, the loss, samples per second and the time left.

    Used as a context; `update` after each step. On a terminal it draws one bar, elsewhere it logs a line like
    "step=120 steps=1000 loss=0.0312 samples_per_s=155.3 left_s=363" at the first step, every `log_every` seconds and
    at the end.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        batch: int,
        first_step: int = 0,
        log_every: Seconds = 10.0,
        console: Console | None = None,
        clock: Callable[[], Seconds] = time.perf_counter,
    ) -> None:
        """`first_step` is where a resumed run begins; `batch` the samples of a step over all ranks."""
        self._num_steps, self._batch, self._log_every, self._clock = num_steps, batch, log_every, clock
        self._console = console or Console(stderr=True)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._done = first_step
        self._step_s: Seconds | None = None
        self._last = self._logged = clock()
        self._is_first = True
        self._task = (
            None if self._bar is None else self._bar.add_task("train", total=num_steps, completed=first_step, text="")
        )

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that step `step`, counted from 0, is done; of `values` the bar shows "loss", the log everything.

        The first step counts for no rate: it holds what happens only once.
        """
        now = self._clock()
        self._done = step + 1
        if not self._is_first:
            spent = now - self._last
            self._step_s = spent if self._step_s is None else self._step_s + SMOOTHING * (spent - self._step_s)
        self._last = now
        is_last = self._done >= self._num_steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, text=self._text(values))
        elif self._is_first or is_last or now - self._logged >= self._log_every:
            self._logged = now
            logger.info("%s", self._line(values))
        self._is_first = False

    def pause(self) -> None:
        """Leave the time until now out of the rate, after a validation, a checkpoint or samples."""
        self._last = self._clock()

    def __enter__(self) -> Self:
        self._last = self._logged = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _rates(self) -> tuple[float, Seconds] | None:
        """Samples per second and the time left."""
        if not self._step_s:
            return None
        return self._batch / self._step_s, (self._num_steps - self._done) * self._step_s

    def _text(self, values: Mapping[str, float]) -> str:
        parts = [f"loss {values['loss']:.4g}"] if "loss" in values else []
        if rates := self._rates():
            parts += [f"{rates[0]:.4g} samples/s", f"{_clock_time(rates[1])} left"]
        return ", ".join(parts)

    def _line(self, values: Mapping[str, float]) -> str:
        pairs = {"step": f"{self._done}", "steps": f"{self._num_steps}"}
        pairs |= {name: f"{value:.4g}" for name, value in values.items()}
        if rates := self._rates():
            pairs |= {"samples_per_s": f"{rates[0]:.4g}", "left_s": f"{rates[1]:.0f}"}
        return " ".join(f"{name}={value}" for name, value in pairs.items())


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=False,
    )


def _clock_time(seconds: Seconds) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

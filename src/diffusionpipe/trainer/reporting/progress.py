"""The progress of the training: a bar on a terminal, otherwise a line in the log now and then. Rank 0 shows it."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from diffusionpipe.trainer.reporting.screen import Screen, Work
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

SMOOTHING = 0.05
"""Weight of the newest step in the mean time of a step."""

WIDE = 100
"""Columns of a terminal in which the bar has room for the memory too."""


class TrainingProgress:
    """A context that shows steps done, the loss, samples per second and the time left; call `update` after each step.

    On a terminal it draws one bar, elsewhere it logs a line like "step=120 steps=1000 loss=0.0312 step_s=0.42
    samples_per_s=152.4 mean_samples_per_s=155.3 left_s=363" at the first step, every `log_every` seconds and at the
    end. The mean is over about the last twenty steps, without the time of validations, checkpoints and samples.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        batch: int,
        screen: Screen,
        first_step: int = 0,
        log_every: Seconds = 10.0,
        clock: Callable[[], Seconds] = time.perf_counter,
    ) -> None:
        """Prepares the display, which the context then shows.

        `num_steps`: the steps of the whole run; `batch`: the samples of a step over all ranks; `first_step`: the steps
        that a resumed run has done before; `clock`: returns the present time.
        """
        self._num_steps, self._batch, self._log_every, self._screen = num_steps, batch, log_every, screen
        self._clock = clock
        self._done = first_step
        self._step_s: Seconds | None = None
        self._last = self._logged = self._clock()
        self._is_first = True
        self._open = ExitStack()
        self._bar: Work | None = None

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows that step `step`, counted from 0, is done; the bar shows loss and memory, the log all `values`.

        The time of the first step does not count in the rates: it holds work that happens only once.
        """
        now = self._clock()
        self._done = step + 1
        if not self._is_first:
            spent = now - self._last
            self._step_s = spent if self._step_s is None else self._step_s + SMOOTHING * (spent - self._step_s)
        self._last = now
        is_last = self._done >= self._num_steps
        if self._screen.columns is not None:
            self._draw(self._text(values))
        elif self._is_first or is_last or now - self._logged >= self._log_every:
            self._logged = now
            logger.info("%s", self._line(values))
        self._is_first = False

    def pause(self) -> None:
        """Excludes the time since the last step from the rates; call it after a validation, a checkpoint or samples."""
        self._last = self._clock()

    def __enter__(self) -> Self:
        self._last = self._logged = self._clock()
        self._bar = self._open.enter_context(self._screen.bar("training"))
        self._draw("")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()
        self._bar = None

    def _draw(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(self._done, self._num_steps, f"{self._done}/{self._num_steps} {text}")

    def _rates(self) -> tuple[float, Seconds] | None:
        """(samples per second, seconds left), by the mean time of a step; None before the second step."""
        if not self._step_s:
            return None
        return self._batch / self._step_s, (self._num_steps - self._done) * self._step_s

    def _text(self, values: Mapping[str, float]) -> str:
        parts = [f"loss {values['loss']:.4g}"] if "loss" in values else []
        if rates := self._rates():
            parts += [f"{rates[0]:.4g} samples/s", f"{_clock_time(rates[1])} left"]
        if "memory_peak_gib" in values and (self._screen.columns or 0) >= WIDE:
            parts.append(f"{values['memory_peak_gib']:.1f} GiB")
        return ", ".join(parts)

    def _line(self, values: Mapping[str, float]) -> str:
        pairs = {"step": f"{self._done}", "steps": f"{self._num_steps}"}
        pairs |= {name: f"{value:.4g}" for name, value in values.items()}
        if rates := self._rates():
            pairs |= {"mean_samples_per_s": f"{rates[0]:.4g}", "left_s": f"{rates[1]:.0f}"}
        return " ".join(f"{name}={value}" for name, value in pairs.items())


def _clock_time(seconds: Seconds) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

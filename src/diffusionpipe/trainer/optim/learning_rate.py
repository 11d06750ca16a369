"""The learning rate of every update, as a pure function of the update's number."""

import math
from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.named_rates import factor_at


class Decay(StrEnum):
    """The course of the learning rate after the warm-up steps: constant, or a linear or cosine fall."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """The numbers of a learning rate schedule: linear warm-up steps to a peak, then constant or a decay.

    The decay is linear or a cosine, to a fraction of the peak. A schedule of transformers can take its place.
    """

    peak: float
    """The highest learning rate."""
    decay: Decay
    """The shape after the warm-up."""
    warmup_steps: int
    """Updates until the peak is reached; 0 starts at the peak."""
    total_steps: int
    """Updates of the whole training; later ones keep the final value."""
    final_fraction: float
    """The part of the peak at `total_steps`; without effect for a constant schedule, which keeps the peak."""
    named: str = ""
    """Name of the schedule of transformers that holds in place of `decay`."""
    arguments: str = "{}"
    """The arguments of the schedule of transformers, JSON."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            RecipeError: a value is out of its range; every problem is listed.
        """
        problems = []
        if not (math.isfinite(self.peak) and self.peak > 0):
            problems.append(f"the learning rate is {self.peak}; it must be a positive number")
        if self.warmup_steps < 0:
            problems.append(f"warmup_steps is {self.warmup_steps}; it must be 0 or more")
        if self.total_steps < 1:
            problems.append(f"total_steps is {self.total_steps}; it must be 1 or more")
        if self.decay is not Decay.CONSTANT and self.warmup_steps >= self.total_steps > 0:
            problems.append(
                f"{self.warmup_steps} warm-up steps leave nothing of {self.total_steps} steps for the {self.decay} "
                "decay; use fewer"
            )
        if not 0.0 <= self.final_fraction <= 1.0:
            problems.append(f"final_fraction is {self.final_fraction}; it must be between 0 and 1")
        if problems:
            raise RecipeError("\n".join(problems))


def learning_rate_at(step: int, schedule: LearningRateSchedule) -> float:
    """The learning rate of update `step`, counted from 0.

    Warm-up of w updates: peak (step + 1) / w, so that the first update already moves and update w - 1 has the peak.
    After it, with x = (step - w) / (total - w), at most 1, and final fraction f:

        linear   peak (1 - (1 - f) x)
        cosine   peak (f + (1 - f) (1 + cos(pi x)) / 2)

    A named schedule has its own formula, in transformers.
    """
    if schedule.named:
        return schedule.peak * factor_at(
            step,
            schedule.named,
            schedule.arguments,
            peak=schedule.peak,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
        )
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    if schedule.decay is Decay.CONSTANT:
        return schedule.peak
    # Later updates keep the final rate.
    x = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
    final = schedule.final_fraction
    if schedule.decay is Decay.LINEAR:
        return schedule.peak * (1.0 - (1.0 - final) * x)
    return schedule.peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * x)))

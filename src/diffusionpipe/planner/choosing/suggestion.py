"""Suggests another layout for a run, if the corrected profile says that it would be clearly faster."""

from dataclasses import dataclass

from diffusionpipe.ir import Plan, Timeline
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Seconds

GAIN = 0.05
"""A layout is suggested if the run's steps take longer than its steps by more than this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Another layout that would be faster for a run, with its plan and its predicted times."""

    sizes: str
    """The schedule and its sizes in words, e.g. "1f1b, 2 stages, 4 micro-batches, filled"."""
    step: Seconds
    """Predicted seconds of a step."""
    plan: Plan
    timeline: Timeline
    """The simulated timeline of its iteration."""


def suggest(setting: Setting, step: Seconds, *, fill: bool | None, sample_batch: int = 0) -> Suggestion | None:
    """The fastest layout that fits in memory, if steps of `step` seconds take over 5 % longer than its own; else None.

    `fill`: whether encoders run in bubbles, None tries both. `sample_batch`: the samples drawn at a time during
    training, 0 for one per stage.

    Raises:
        ConfigError: the sizes that are given do not fit each other.
    """
    choice = best_choice(setting, fill=fill)
    if choice is None or step <= choice.step * (1 + GAIN):
        return None
    return Suggestion(
        sizes=choice.sizes,
        step=choice.step,
        plan=choice.plan(sample_batch=sample_batch),
        timeline=choice.proposal.timeline,
    )

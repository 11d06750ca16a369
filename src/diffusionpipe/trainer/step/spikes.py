"""Steps whose loss or gradient norm is far above the steps before, by a rule that outliers cannot move.

A value is a spike if it is more than `DEVIATIONS` deviations above the median of the last `WINDOW` values, and more
than `FACTOR` times this median. The deviation is the median absolute deviation, scaled to a normal distribution's.
Spikes do not count among the past values. Loss and norm are sums over all ranks, so every rank judges alike.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from math import inf
from statistics import median

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.recipe import OnSpike

WINDOW = 100
LEAST = 20
"""The number of past values that are needed before a value can be a spike."""
DEVIATIONS = 10.0
FACTOR = 2.0
_NORMAL = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""

_NAMES = ("loss", "gradient_norm")
_KEY = "past_values"


class Spikes:
    """Judges whether a step's loss or norm is a spike, by the values of the last 100 steps."""

    def __init__(self, reaction: OnSpike, kept: Mapping[str, Iterable[float]] | None = None) -> None:
        self.reaction = reaction
        self._past = {name: deque((kept or {}).get(name, ()), maxlen=WINDOW) for name in _NAMES}

    def judge(self, loss: float, gradient_norm: float) -> str | None:
        """Why this step is a spike, in words; None if it is not one, and then its values count as past values."""
        if self.reaction is OnSpike.NONE:
            return None
        values = dict(zip(_NAMES, (loss, gradient_norm), strict=True))
        problems = [_problem(name, value, self._past[name]) for name, value in values.items()]
        found = [problem for problem in problems if problem is not None]
        if found:
            return " and ".join(found)
        for name, value in values.items():
            self._past[name].append(value)
        return None

    def state(self) -> dict[str, object]:
        """The past losses and norms to add to a checkpoint's state, so that a resumed run judges alike.

        {} if the recipe has no reaction to spikes.
        """
        past = {name: list(values) for name, values in self._past.items()}
        return {} if self.reaction is OnSpike.NONE else {_KEY: past}


def kept_values(state: Mapping[str, object]) -> dict[str, list[float]]:
    """The past values, "loss" and "gradient_norm", in a checkpoint's state; {} if its run did not judge spikes.

    Raises:
        CheckpointError: no run has written such values.
    """
    kept = state.get(_KEY, {})
    if not isinstance(kept, Mapping) or not all(isinstance(values, list) for values in kept.values()):
        raise CheckpointError(f"the checkpoint's state.json has no lists of past values in {_KEY!r}")
    if wrong := [value for values in kept.values() for value in values if not _is_past(value)]:
        raise CheckpointError(f"the checkpoint's state.json has the past value {str(wrong[0])[:100]!r} in {_KEY!r}")
    return {str(name): list(values) for name, values in kept.items()}


def _is_past(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def _problem(name: str, value: float, past: deque[float]) -> str | None:
    if len(past) < LEAST:
        return None
    usual = median(past)
    deviation = _NORMAL * median(abs(one - usual) for one in past)
    # Both bounds: the deviation of a smooth loss is nearly 0, and a median alone says nothing of a noisy one.
    if value <= FACTOR * usual or value <= usual + DEVIATIONS * deviation:
        return None
    return f"{name}={value:.4g} is {value / usual:.1f} times the median of the last {len(past)} steps ({usual:.4g})"

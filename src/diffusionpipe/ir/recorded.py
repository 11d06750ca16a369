"""The times of the first steps of a run, as all its ranks recorded them: a prediction is compared with them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from diffusionpipe.ir.timeline import Timeline
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """The seconds of one layer's forward for a number of samples, as a run recorded it."""

    name: str
    samples: int
    seconds: Seconds
    keeps: bool = True
    """Whether the forward kept the tensors that a backward needs; False in a probe, and in the frozen part."""


def medians_of(times: Iterable[LayerTime]) -> tuple[LayerTime, ...]:
    """The median time of each layer for each number of samples, with and without tensors kept for a backward."""
    found: dict[LayerTime, list[Seconds]] = defaultdict(list)
    for one in times:
        found[replace(one, seconds=0.0)].append(one.seconds)
    return tuple(replace(one, seconds=median(seconds)) for one, seconds in found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The median times over some steps of a run: of actions, ranks, iterations and layers."""

    steps: tuple[int, int]
    """The first and the last of the recorded steps, counted from 1."""
    timeline: Timeline
    """The start of every action and its duration. Its workers are ranks; the clock is the same for all."""
    ends: tuple[Seconds, ...]
    """The end of each rank's iteration, sums of gradients included, by rank, in seconds."""
    iteration: Seconds
    """The time from the common start to the last end of all ranks, in seconds."""
    step: Seconds
    """The time of an iteration, the update after it, and the rest of a step; without the wait for its batch."""
    layers: tuple[LayerTime, ...] = ()
    """Forwards of single layers; () where none were recorded."""
    others: float | None = None
    """The part of the cores that other programs used meanwhile; None where that is unknown."""
    num_disturbed: int = 0
    """The number of steps that do not count, because other programs used cores that the ranks needed."""
    loading: tuple[Seconds, ...] = ()
    """The processor time of each rank's data workers for a step, by rank, in seconds; () where that is unknown."""

"""What the first steps of a run took, as all its ranks recorded them: what a prediction is compared with."""

from dataclasses import dataclass

from diffusionpipe.ir.timeline import Timeline
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """A layer's forward of so many samples, in training."""

    name: str
    samples: int
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Medians over some steps of a run."""

    steps: tuple[int, int]
    """The first and the last of them, counted from 1."""
    timeline: Timeline
    """When every action started, and how long it took. Its workers are ranks; the clock is one for all."""
    ends: tuple[Seconds, ...]
    """By rank the end of its iteration, which waits for gradient sums too."""
    iteration: Seconds
    """From the common start to the last end of all ranks."""
    step: Seconds
    """An iteration, the update after it, and what else a step does; without the wait for its batch."""
    layers: tuple[LayerTime, ...] = ()
    """Forwards of single layers; () where none were recorded."""

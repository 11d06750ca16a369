"""The question about two backbones that share their devices, and its answer; `opposed_partition` finds one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffusionpipe.planner.search.dynamic_program import LinkTime, Numbers, StageTime
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class TwoSidedQuestion:
    """A question to the two-sided program: layers of two backbones to cut, devices, and functions that price stages.

    Devices are in a row; each pair of stages takes the next ones.
    """

    num_layers: tuple[int, int]
    num_devices: int
    replicas: tuple[int, ...]
    """The numbers of devices that a block may have."""
    stage: Callable[[int, int, int, int, int], StageTime]
    """(backbone, first layer, stop layer, first device, replicas) -> times for one micro-batch of that backbone."""
    link: Callable[[int, int, int, int, int], LinkTime]
    """(backbone, cut, first device after the cut, replicas before it and after it) -> times."""
    cap: Seconds
    """The largest load of a device that is allowed, as the objective counts it."""
    work: tuple[Sequence[Seconds], Sequence[Seconds]]
    """Running sums of F + B of a micro-batch through the layers: the least that the devices of their blocks take
    together. A state that cannot be finished under the cap is not begun."""
    fits: Callable[[tuple[int, int], tuple[int, int], int, int, int], bool] = lambda *_: True
    """(layers of the first, layers of the second, first device, replicas, blocks from here on) -> whether both stages
    fit in memory. If stages do not fit, longer ones must not fit either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPartition:
    """A pair of partitions: first layers of two backbones' stages, devices of each block, and the objective's value."""

    starts: tuple[tuple[int, ...], tuple[int, ...]]
    """(first layers of the first backbone's stages, of the second's), as the program counts layers."""
    replicas: tuple[int, ...]
    """The number of devices of each block, in the order of devices."""
    value: Seconds
    numbers: Numbers
    """The numbers that describe the pair to the objective."""

"""The question about two backbones that share their devices, and its answer; `opposed_partition` finds one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffusionpipe.planner.search.dynamic_program import LinkTime, Numbers, StageTime
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class TwoSidedQuestion:
    """The layers of two backbones to cut, the devices to cut them over, and the functions that price stages.

    Devices are in a row; each pair of stages takes the next ones.
    """

    num_layers: tuple[int, int]
    num_devices: int
    replicas: tuple[int, ...]
    """How many devices a block may have."""
    stage: Callable[[int, int, int, int, int], StageTime]
    """(backbone, first layer, stop layer, first device, replicas) -> times for one micro-batch of that backbone."""
    link: Callable[[int, int, int, int, int], LinkTime]
    """(backbone, cut, first device after the cut, replicas before it and after it) -> times."""
    cap: Seconds
    """The largest load of a device, as the objective says."""
    work: tuple[Sequence[Seconds], Sequence[Seconds]]
    """Running sums of F + B of a micro-batch through the layers: the least that the devices of their blocks take
    together. A state that cannot be finished under the cap is not begun."""
    fits: Callable[[tuple[int, int], tuple[int, int], int, int, int], bool] = lambda *_: True
    """(layers of the first, layers of the second, first device, replicas, blocks from here on) -> whether both fit in
    memory. Longer stages must not fit where shorter ones do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPartition:
    """The first layer of each stage of two backbones, the devices of each block, and the objective's value."""

    starts: tuple[tuple[int, ...], tuple[int, ...]]
    replicas: tuple[int, ...]
    """The number of devices of each block, in the order of devices."""
    value: Seconds
    numbers: Numbers

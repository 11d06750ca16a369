"""The costs of a schedule's actions: the simulator's input."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The seconds in which a host issues the kernels of a layer's or stage's forward, input and weight gradients.

    They do not depend on the number of samples. 0 where host and device are one, as on a CPU.

    Raises:
        ValueError: a time is negative.
    """

    forward: Seconds = 0
    input_grad: Seconds = 0
    weight_grad: Seconds = 0
    """A whole backward takes both."""

    def __post_init__(self) -> None:
        if not (self.forward >= 0 and self.input_grad >= 0 and self.weight_grad >= 0):  # this form also refuses NaN
            raise ValueError(
                f"times of the host must be 0 or more; they are {self.forward} s in a forward, {self.input_grad} s and "
                f"{self.weight_grad} s in a backward"
            )


NO_HOST = HostTimes()
"""The host takes no time beside the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The seconds and bytes of one stage's actions for one micro-batch, of its own share of the samples.

    Raises:
        ValueError: a cost is negative.
    """

    forward: Seconds = 1
    backward: Seconds = 2
    """Time of op B, the whole backward."""
    input_grad: Seconds = 1
    """Time of op I, the input gradient."""
    weight_grad: Seconds = 1
    """Time of op W, the weight gradient."""
    activation: Bytes = 1
    """Bytes held from the start of F to the end of B (or of I, W)."""
    kept_after_input_grad: Bytes = 1
    """Bytes held from the end of I to the end of W; more than the activation where layers are recomputed."""
    host: HostTimes = NO_HOST
    """The times in which the host issues the kernels of these actions; the device computes beside it."""

    def __post_init__(self) -> None:
        negative = [n for n in self.__dataclass_fields__ if n != "host" and getattr(self, n) < 0]
        if negative:
            raise ValueError(f"stage costs must not be negative: {', '.join(negative)}")


@dataclass(frozen=True, slots=True)
class Link:
    """The latency, bandwidth and overheads of a directed link between two workers."""

    latency: Seconds = 0
    bandwidth: float = inf
    """The rate of the link in bytes per second; infinite: messages take the latency alone."""
    overhead: Seconds = 0
    """Time that each end cannot compute for one tensor of a message (o in LogP: Culler et al., PPoPP 1993)."""
    overhead_per_byte: Seconds = 0
    """Time that each end cannot compute for one byte of a message; 0 where a device of its own copies."""

    def transfer(self, num_bytes: Bytes) -> Seconds:
        """The seconds of one message of this size: latency + bytes / bandwidth."""
        return self.latency + (num_bytes / self.bandwidth if self.bandwidth != inf else 0)

    def occupancy(self, num_bytes: Bytes, num_tensors: int) -> Seconds:
        """The seconds in which each end of one message cannot compute, for its tensors and its bytes."""
        return num_tensors * self.overhead + num_bytes * self.overhead_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of every action of one schedule: by stage, by fill, and by link."""

    stages: tuple[StageCosts, ...]
    """One per stage of the placement (encoder stages too: any value, their cost is in `fills`)."""
    fills: tuple[Seconds, ...] = ()
    """The time of each fill of the schedule, by fill."""
    host_fills: tuple[Seconds, ...] = ()
    """The time in which the host issues each fill; () for none."""
    reduces: tuple[Seconds, ...] = ()
    """Time of each stage's gradient reduction, by stage; () for none."""
    unshards: tuple[Seconds, ...] = ()
    """Time in which the parameters of each stage's block are gathered, by stage; () for none."""
    waking: tuple[tuple[Seconds, Seconds], ...] = ()
    """(wait, extra time of an action after it), ascending; () if waits cost nothing. See `costs/waking.py`."""
    tensor_bytes: Mapping[str, Bytes] = field(default_factory=dict)
    """Bytes of one sample of each named tensor; absent names count 0."""
    link: Link = Link()
    """The link between any two workers that `links` does not name."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """The links of single pairs (source, destination) of workers; every other pair has the default link."""

    @property
    def has_hosts(self) -> bool:
        """Whether hosts take any time to issue work, in a fill or a stage."""
        return any(self.host_fills) or any(stage.host != NO_HOST for stage in self.stages)

    def link_between(self, source: int, destination: int) -> Link:
        """The link from worker `source` to worker `destination`: its own one, or else the default link."""
        return self.links.get((source, destination), self.link)


def without_hosts(costs: Costs) -> Costs:
    """The same costs, but with hosts that take no time to issue kernels."""
    return replace(costs, stages=tuple(replace(stage, host=NO_HOST) for stage in costs.stages), host_fills=())

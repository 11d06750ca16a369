"""The machines: devices, the nodes that they stand in, and the links between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from diffusionpipe.costs.actions import Link
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device."""

    name: str
    memory: Bytes
    """What training may use of its memory."""
    speed: float = 1.0
    """Speed relative to the device of the profile: times are divided by it."""
    host_bandwidth: float = 0
    """Bytes per second from host memory, all devices of a node copying at once; 0: not known."""

    def __post_init__(self) -> None:
        if self.memory <= 0 or not 0 < self.speed < inf:
            raise ValueError(f"device {self.name}: memory and speed must be positive; got {self.memory}, {self.speed}")
        if not 0 <= self.host_bandwidth < inf:
            raise ValueError(f"device {self.name}: host_bandwidth must be bytes per second or 0: {self.host_bandwidth}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The cost of summing a tensor over ranks: latency + 2 (n - 1) / n x bytes / bandwidth, as a ring does it."""

    latency: Seconds
    bandwidth: float
    """Bus bandwidth in bytes per second, as nccl-tests call it."""

    def seconds(self, num_bytes: Bytes, num_ranks: int) -> Seconds:
        """Time over `num_ranks` ranks; 0 for one."""
        if num_ranks < 2:
            return 0.0
        return self.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks in order: rank r is device `devices[r]` in node `nodes[r]`."""

    name: str
    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    """Node of each rank, ascending from 0."""
    intra: Link
    """Between two ranks of one node."""
    inter: Link
    """Between two ranks of different nodes (per rank, all sending at once)."""
    intra_reduce: AllReduce
    inter_reduce: AllReduce

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.nodes):
            raise ValueError(f"{len(self.devices)} devices and {len(self.nodes)} nodes; give one node per device")
        if list(self.nodes) != sorted(self.nodes) or self.nodes[0] != 0:
            raise ValueError(f"nodes must ascend from 0; got {self.nodes}")
        lines = {name: getattr(self, name) for name in ("intra", "inter", "intra_reduce", "inter_reduce")}
        wrong = [
            f"{name} has latency {line.latency} and bandwidth {line.bandwidth}"
            for name, line in lines.items()
            if line.latency < 0 or not line.bandwidth > 0
        ]
        wrong += [
            f"{name} has overhead {link.overhead} and overhead_per_byte {link.overhead_per_byte}"
            for name, link in (("intra", self.intra), ("inter", self.inter))
            if not link.overhead >= 0 or not link.overhead_per_byte >= 0
        ]
        if wrong:
            raise ValueError(f"latencies and overheads must not be negative, bandwidths positive; {', '.join(wrong)}")

    @property
    def num_ranks(self) -> int:
        """All devices."""
        return len(self.devices)

    def link(self, source: int, destination: int) -> Link:
        """The link between two ranks."""
        return self.intra if self.nodes[source] == self.nodes[destination] else self.inter

    def all_reduce(self, num_bytes: Bytes, ranks: Sequence[int]) -> Seconds:
        """Time of a sum over these ranks."""
        crosses = len({self.nodes[rank] for rank in ranks}) > 1
        return (self.inter_reduce if crosses else self.intra_reduce).seconds(num_bytes, len(ranks))

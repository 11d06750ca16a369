"""The machines: devices, the nodes that hold them, and the links between them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median_high

from diffusionpipe.costs.actions import Link
from diffusionpipe.units import Bytes, Seconds

LEAST_RATE = 1e-6
"""The least bandwidth (bytes a second) and the least relative speed of a cluster: with it all times stay finite."""
MOST_WAIT: Seconds = 1e9
"""The largest latency or overhead of a link, in seconds: 30 years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device: its name, its usable memory, and its speed relative to the profiled device.

    Raises:
        ValueError: a memory, speed or bandwidth is outside its range.
    """

    name: str
    memory: Bytes
    """The part of its memory that training may use."""
    speed: float = 1.0
    """Speed relative to the device of the profile: times are divided by it."""
    host_bandwidth: float = 0
    """Bytes per second from host memory, all devices of a node copying at once; 0: not known."""

    def __post_init__(self) -> None:
        if self.memory <= 0 or not 0 < self.speed < inf:  # NaN is refused too
            raise ValueError(f"device {self.name}: memory and speed must be positive; got {self.memory}, {self.speed}")
        if not LEAST_RATE <= self.speed <= 1 / LEAST_RATE:
            raise ValueError(
                f"device {self.name}: speed is relative to the profiled device: "
                f"{LEAST_RATE:g} to {1 / LEAST_RATE:g}; got {self.speed:g}"
            )
        if self.memory > 2**60:
            raise ValueError(f"device {self.name}: no device has a memory of more than 2^60 bytes")
        if self.host_bandwidth != 0 and not LEAST_RATE <= self.host_bandwidth < inf:
            raise ValueError(
                f"device {self.name}: host_bandwidth must be bytes per second, at least {LEAST_RATE:g}, or 0: "
                f"{self.host_bandwidth}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The cost of summing a tensor over ranks: latency + 2 (n - 1) / n x bytes / bandwidth, as a ring does it."""

    latency: Seconds
    bandwidth: float
    """Bus bandwidth in bytes per second, as nccl-tests call it."""

    def seconds(self, num_bytes: Bytes, num_ranks: int) -> Seconds:
        """The seconds of a sum of `num_bytes` bytes over `num_ranks` ranks; 0 for one rank."""
        if num_ranks < 2:
            return 0.0
        return self.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """The measured latency and bandwidth between two ranks, the same in both directions."""

    first: int
    """The smaller one of the two ranks."""
    second: int
    """The larger one of the two ranks."""
    latency: Seconds
    bandwidth: float
    """The rate of the link in bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices, nodes and links of a job; rank r is device `devices[r]` in node `nodes[r]`.

    Raises:
        ValueError: devices and nodes do not fit together, or a link or pair has values outside their range.
    """

    name: str
    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    """Node of each rank, ascending from 0."""
    intra: Link
    """The link between two ranks of one node."""
    inter: Link
    """The link between two ranks of different nodes, with the bandwidth of each rank while all ranks send."""
    intra_reduce: AllReduce
    """The cost of a sum over ranks of one node."""
    inter_reduce: AllReduce
    """The cost of a sum over ranks of several nodes."""
    pairs: tuple[PairLink, ...] = ()
    """Links that were measured one by one; `intra` and `inter` describe all other pairs, and have the overheads."""

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.nodes):
            raise ValueError(
                f'"nodes" has {len(self.nodes)} numbers for {len(self.devices)} devices; give each device the number '
                "of its node, e.g. [0, 0, 1, 1]"
            )
        if list(self.nodes) != sorted(self.nodes) or {*self.nodes} != {*range(self.nodes[-1] + 1)}:
            raise ValueError(f"nodes must ascend from 0 without gaps; got {self.nodes}")
        lines = {name: getattr(self, name) for name in ("intra", "inter", "intra_reduce", "inter_reduce")}
        wrong = [
            f"{name} has latency {line.latency} and bandwidth {line.bandwidth}"
            for name, line in lines.items()
            # `not >=` refuses NaN, `<` would not.
            if not 0 <= line.latency <= MOST_WAIT or not line.bandwidth >= LEAST_RATE
        ]
        wrong += [
            f"{name} has overhead {link.overhead} and overhead_per_byte {link.overhead_per_byte}"
            for name, link in (("intra", self.intra), ("inter", self.inter))
            if not 0 <= link.overhead <= MOST_WAIT or not 0 <= link.overhead_per_byte <= MOST_WAIT
        ]
        wrong += [
            f"the link of ranks {pair.first} and {pair.second} has latency {pair.latency}, bandwidth {pair.bandwidth}"
            for pair in self.pairs
            if not 0 <= pair.latency <= MOST_WAIT or not pair.bandwidth >= LEAST_RATE
        ]
        if wrong:
            raise ValueError(
                f"latencies and overheads must not be negative, bandwidths positive; {', '.join(wrong)} "
                f"(at most {MOST_WAIT:g} s, at least {LEAST_RATE:g} bytes a second)"
            )
        named = [(pair.first, pair.second) for pair in self.pairs]
        lost = [pair for pair in named if not 0 <= pair[0] < pair[1] < len(self.nodes)]
        if lost or len(set(named)) < len(named):
            raise ValueError(f"pairs must name each two ranks once, the smaller first; got {lost or named}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks, one for each device."""
        return len(self.devices)

    @cached_property
    def _own_links(self) -> dict[tuple[int, int], Link]:
        found: dict[tuple[int, int], Link] = {}
        for pair in self.pairs:
            of_kind = self._link_of_kind(pair.first, pair.second)
            link = replace(of_kind, latency=pair.latency, bandwidth=pair.bandwidth)
            found[pair.first, pair.second] = found[pair.second, pair.first] = link
        return found

    def _link_of_kind(self, source: int, destination: int) -> Link:
        return self.intra if self.nodes[source] == self.nodes[destination] else self.inter

    def link(self, source: int, destination: int) -> Link:
        """The link from rank `source` to rank `destination`: the measured one, or else the one of its kind.

        The kinds are `intra`, within a node, and `inter`, between nodes.
        """
        return self._own_links.get((source, destination)) or self._link_of_kind(source, destination)

    def slowest_link(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """The slowest link between these pairs of ranks, with which messages are priced where all ranks run in step.

        In a cluster with measured pairs it has the worst of each figure of their links. In others it is `inter` if any
        pair crosses nodes, else `intra`.
        """
        links = {self.link(*pair) for pair in pairs}
        if not self.pairs:
            return self.inter if self.inter in links else self.intra
        return Link(
            latency=max(link.latency for link in links),
            bandwidth=min(link.bandwidth for link in links),
            overhead=max(link.overhead for link in links),
            overhead_per_byte=max(link.overhead_per_byte for link in links),
        )

    def all_reduce(self, num_bytes: Bytes, ranks: Sequence[int]) -> Seconds:
        """The seconds of a sum of `num_bytes` bytes over these ranks, inside a node or across nodes."""
        crosses = len({self.nodes[rank] for rank in ranks}) > 1
        return (self.inter_reduce if crosses else self.intra_reduce).seconds(num_bytes, len(ranks))


def of_ranks(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """The cluster of these ranks alone; the first of them becomes rank 0, and so on. `ranks` ascend."""
    place = {rank: number for number, rank in enumerate(ranks)}
    # Numbers of nodes ascend from 0 without gaps.
    nodes = {node: number for number, node in enumerate(dict.fromkeys(cluster.nodes[rank] for rank in ranks))}
    return replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in ranks),
        nodes=tuple(nodes[cluster.nodes[rank]] for rank in ranks),
        pairs=tuple(
            replace(pair, first=place[pair.first], second=place[pair.second])
            for pair in cluster.pairs
            if pair.first in place and pair.second in place
        ),
    )


def with_memory(cluster: Cluster, memory: Bytes) -> Cluster:
    """The cluster with each device's memory for training limited to `memory` bytes; smaller memories stay."""
    return replace(
        cluster, devices=tuple(replace(device, memory=min(device.memory, memory)) for device in cluster.devices)
    )


def with_less_memory(cluster: Cluster, less: Bytes) -> Cluster:
    """The cluster with `less` fewer bytes for training on each device, but at least one byte."""
    devices = tuple(replace(device, memory=max(1, device.memory - less)) for device in cluster.devices)
    return replace(cluster, devices=devices)


def repeated(cluster: Cluster, times: int) -> Cluster:
    """A cluster of `times` copies of all nodes of `cluster`; its `inter` and `inter_reduce` join the copies too."""
    num_nodes, num_ranks = cluster.nodes[-1] + 1, cluster.num_ranks
    return replace(
        cluster,
        devices=cluster.devices * times,
        nodes=tuple(node + num_nodes * again for again in range(times) for node in cluster.nodes),
        pairs=tuple(
            replace(pair, first=pair.first + num_ranks * again, second=pair.second + num_ranks * again)
            for again in range(times)
            for pair in cluster.pairs
        ),
    )


SLOW = 5.0
"""A link is slow if most of its kind are this many times as fast."""


def slow_pairs(
    rates: Mapping[tuple[int, int], float], places: Sequence[object]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Pair of ranks -> (its rate, the usual rate of its kind), for pairs whose rate is below a fifth of the usual one.

    `rates` has the measured rate of each pair, `places` the node or host of each rank. Pairs inside a place are one
    kind, pairs between places another; the usual rate is the median of a kind.
    """
    kinds: dict[bool, list[float]] = defaultdict(list)
    for (one, other), rate in rates.items():
        kinds[places[one] == places[other]].append(rate)
    # The upper one of two middle rates: of two pairs the slow one is found.
    usual = {kind: median_high(found) for kind, found in kinds.items()}
    found = {pair: (rate, usual[places[pair[0]] == places[pair[1]]]) for pair, rate in sorted(rates.items())}
    return {pair: (rate, typical) for pair, (rate, typical) in found.items() if rate * SLOW < typical}


def slow_links(cluster: Cluster) -> dict[tuple[int, int], tuple[float, float]]:
    """Pair of ranks -> (its bandwidth, the usual one of its kind), in bytes a second, of a cluster's slow links.

    Only measured pairs are looked at; see `slow_pairs`.
    """
    return slow_pairs({(pair.first, pair.second): pair.bandwidth for pair in cluster.pairs}, cluster.nodes)

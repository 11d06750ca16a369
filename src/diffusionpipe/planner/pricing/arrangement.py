"""The ways in which a cluster's ranks become pipelines, and the links between their stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from diffusionpipe.costs import AllReduce, Cluster, Link
from diffusionpipe.costs.cluster import slow_links
from diffusionpipe.ir import Mesh
from diffusionpipe.planner.pricing.collectives import reduction_rate
from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The form in which ranks become equal pipelines: how many, of how many ranks, and which ranks are side by side.

    Two arrangements with the same numbers differ in the tensors that cross node borders.

    2 nodes of 4, 2 units     adjacent 1:  [01 01 | 01 01]   a pipeline stays in its node, gradients cross
                              adjacent 4:  [0000 | 1111]     activations cross, gradients do not
    """

    data_parallel: int
    """Pipelines side by side."""
    units: int
    """Ranks of a pipeline; a stage takes one or more of them."""
    adjacent: int = 1
    """The number of pipelines whose ranks are side by side (see `Mesh`)."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of a plan on this arrangement, without anything in parts."""
        return Mesh(data_parallel=self.data_parallel, pipeline=self.units, adjacent=self.adjacent)


def arrangements(cluster: Cluster) -> Iterator[Arrangement]:
    """Every arrangement of all ranks; of those with the same tensors across nodes and slow links only one."""
    num_ranks = cluster.num_ranks
    node = cluster.nodes.count(0)
    is_even = node == num_ranks and not slow_links(cluster)
    for units in (u for u in range(1, num_ranks + 1) if num_ranks % u == 0):
        groups = num_ranks // units
        adjacent = {1}
        if units > 1 and not is_even:
            # The ranks of a node, or all copies of a worker, side by side, where whole groups come out so.
            adjacent |= {c for c in (node, groups) if groups % c == 0}
        for c in sorted(adjacent):
            yield Arrangement(data_parallel=groups, units=units, adjacent=c)


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """An arrangement on a cluster, with the speeds, memories and links of its units.

    A unit is a rank of a pipeline, in all groups. Groups run in step, so everywhere the slowest of them counts.
    """

    arrangement: Arrangement
    cluster: Cluster
    _rates: dict[tuple[int, ...], AllReduce] = field(default_factory=dict, repr=False, compare=False)
    _links: dict[tuple[int, int, int, int], Link] = field(default_factory=dict, repr=False, compare=False)

    def ranks(self, units: Sequence[int]) -> list[int]:
        """The ranks of these units in all groups, group by group."""
        mesh = self.arrangement.mesh
        return [mesh.rank(group, unit) for group in range(mesh.data_parallel) for unit in units]

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each unit's slowest device in any group, by unit; 1 is the profiled device."""
        units = range(self.arrangement.units)
        return tuple(min(self.cluster.devices[r].speed for r in self.ranks([unit])) for unit in units)

    @cached_property
    def memories(self) -> tuple[Bytes, ...]:
        """The bytes of memory of each unit's smallest device in any group, by unit."""
        units = range(self.arrangement.units)
        return tuple(min(self.cluster.devices[r].memory for r in self.ranks([unit])) for unit in units)

    def reduction(self, units: Sequence[int]) -> tuple[AllReduce, int]:
        """(latency and bandwidth of gradient sums over these units of all groups, number of ranks)."""
        key = tuple(units)
        if key not in self._rates:
            self._rates[key] = reduction_rate(self.cluster, self.ranks(key))
        return self._rates[key], self.arrangement.data_parallel * len(key)

    def link(self, source: int, senders: int, target: int, receivers: int) -> Link:
        """The slowest link between replicas of two stages whose samples meet, over all groups.

        `source` and `target` are the first units of the stages, `senders` and `receivers` the numbers of their
        replicas.
        """
        key = (source, senders, target, receivers)
        if key not in self._links:
            self._links[key] = self.cluster.slowest_link(self._meetings(*key))
        return self._links[key]

    def _meetings(self, source: int, senders: int, target: int, receivers: int) -> Iterator[tuple[int, int]]:
        mesh = self.arrangement.mesh
        for i in range(senders):
            # Sender i has the samples from i / senders to (i + 1) / senders: the receivers with any of these.
            for j in range(i * receivers // senders, ((i + 1) * receivers - 1) // senders + 1):
                for group in range(mesh.data_parallel):
                    yield mesh.rank(group, source + i), mesh.rank(group, target + j)

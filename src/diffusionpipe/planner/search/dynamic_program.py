"""Cuts layers into stages and gives each stage its devices, by dynamic programs over suffixes of the layers.

    layers    0 1 2 | 3 4 | 5 6 7 8          a suffix (first layer, stages, replicas of its first stage, devices) holds
    devices   0 1   | 2   | 3                everything that stages put before it can change
    replicas  2       1     1

All objectives that are built on one chain of stages fit this one program: they differ in the few numbers that describe
a suffix, and how a stage put before it changes them. If smaller numbers of a suffix never make a whole partition worse,
then keeping for every state those suffixes that no other beats in all numbers (its Pareto front) loses no optimum. This
is the exact form of the programs that DiffusionPipe (Tian et al., MLSys 2024) uses for T^max, of SPP's PRM (Luo et al.)
and of DAPPLE's planner (Fan et al., PPoPP 2021), whose own programs keep one suffix per state; see `objectives`.

    layers 0 1 2 3 take 1 2 3 4; two devices, up to two stages; the slowest stage counts, and each transfer 1

    from layer 3    [1] 3 as the last stage: 4
    from layer 2    [1] 2 3 as the last stage: 7       [2] 2 | 3:     max(3, 4) and 1
    from layer 1    [1] 1 2 3 as the last stage: 9     [2] 1 | 2 3:   max(2, 7), 1 2 | 3: max(5, 4)
    from layer 0    all four as one stage: 10, which leaves a device over        [3] of the others those that no
                    0 | 1 2 3: 9    0 1 | 2 3: 7    0 1 2 | 3: 6                     other beats in all numbers

>>> class SlowestStage:
...     def prepend(self, rest, stage, link):
...         work = stage[0] + stage[1]
...         return (work, 0) if rest is None else (max(rest[0], work), rest[1] + link[0])
...     def value(self, numbers, num_stages):
...         return sum(numbers)
>>> question = Question(
...     num_layers=4, num_devices=2, max_stages=2, replicas=(1,),
...     stage=lambda first, stop, device, replicas, stages: (sum(range(first + 1, stop + 1)), 0, 0),
...     link=lambda cut, device, senders, receivers: (1, 0),
... )
>>> [(partition.starts, partition.value) for partition in best_partitions(question, SlowestStage())]
[((0, 3), 7)]
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import le
from typing import Protocol, TypeAlias

from diffusionpipe.units import Seconds

Numbers: TypeAlias = tuple[float, ...]
"""The numbers that describe a suffix of stages to an objective; smaller is better in each."""
StageTime: TypeAlias = tuple[Seconds, Seconds, Seconds]
"""(forward of one micro-batch, its backward, sum of the stage's gradients), in seconds."""
LinkTime: TypeAlias = tuple[Seconds, Seconds]
"""(transfer of one micro-batch's activations forward, transfer of their gradients back), in seconds."""
PricedStage: TypeAlias = StageTime | tuple[Seconds, Seconds, Seconds, float]
"""The times of a stage on its slowest replica, and the part of them that its fastest replica takes; 1 if not given."""
PricedLink: TypeAlias = LinkTime | tuple[Seconds, Seconds, Seconds, Seconds]
"""(forward, back) at the end with fewer devices, and (forward, back) of the transfer for which all orders wait: only
the next layer's inputs, for the samples of a device at the end with more devices. If these are not given, they are
the same as the first two."""


class PartitionObjective(Protocol):
    """A function by which a partition into stages is judged, built up from its last stage to its first."""

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The numbers of a suffix with one more stage at its front; `rest` None: the stage is the last of all.

        They must not get smaller when a number of `rest` gets larger. `link`: between the stage and the suffix.
        """

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The objective in seconds of a whole partition; it must not get smaller when a number gets larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the dynamic program: layers to cut into stages, devices, and functions that price stages and links.

    Devices are in a row; each stage takes the next ones.
    """

    num_layers: int
    num_devices: int
    max_stages: int
    replicas: tuple[int, ...]
    """The numbers of devices that a stage may take."""
    stage: Callable[[int, int, int, int, int], PricedStage | None]
    """(first layer, stop layer, first device, replicas, stages from this one to the last) -> times of the stage; None:
    it is not allowed, for example it does not fit in memory. If a stage is not allowed, a longer one must not be."""
    link: Callable[[int, int, int, int], PricedLink]
    """(cut, first device after the cut, senders before it, receivers after it) -> times."""
    min_stages: int = 1
    reach: Callable[[int, int], bool] = lambda layers, devices: True
    """(layers, devices) -> whether the layers 0, ..., layers - 1 may be cut over that number of devices at all."""
    longest: Callable[[int, int], int] | None = None
    """(first layer, replicas) -> the last layer at which a stage may stop; None: any."""
    is_hopeless: Callable[[Numbers, int, int, int], bool] | None = None
    """(numbers of a suffix, its stages, layers before it, devices before it) -> whether no partition that ends in the
    suffix is of use. If a suffix is not hopeless, one that is better in all numbers must not be hopeless either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition of layers into stages: their first layers and numbers of devices, and the value of the objective."""

    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    """The number of devices of each stage."""
    value: Seconds
    numbers: Numbers = ()
    """The numbers that describe it to the objective."""


_Node: TypeAlias = tuple[Numbers, int, int, "_Node | None"]
"""(numbers of a suffix, its first layer, replicas of its first stage, the suffix after that stage or None)."""


def best_partitions(question: Question, objective: PartitionObjective, *, width: int = 16) -> tuple[Partition, ...]:
    """The partitions on the Pareto fronts of all numbers of stages, best value first; () where nothing fits.

    The first one is optimal as long as no front is longer than `width`; a longer one keeps its best values. Ties are
    broken by fewer stages, then by later starts, so the result is unique.

    Cost: O(layers² x stages x devices x replicas² x width) steps in the worst case; `reach` and stages that are not
    allowed cut most of it away.
    """
    fronts = _fronts(question, objective, width)
    found = [
        Partition(
            starts=_starts(node),
            replicas=_replicas(node),
            value=objective.value(node[0], stages),
            numbers=node[0],
        )
        for (devices, stages, _), nodes in fronts.items()
        if devices == question.num_devices and stages >= question.min_stages
        for node in nodes
    ]
    unique = {(p.starts, p.replicas): p for p in found}
    return tuple(
        sorted(unique.values(), key=lambda p: (p.value, len(p.starts), tuple(-s for s in p.starts), p.replicas))
    )


_State: TypeAlias = tuple[int, int, int]
"""(devices of a suffix, its number of stages, replicas of its first stage)."""


def _fronts(question: Question, objective: PartitionObjective, width: int) -> dict[_State, list[_Node]]:
    """State -> the Pareto front of the suffixes that begin at layer 0, that is of whole partitions."""
    num_layers, num_devices = question.num_layers, question.num_devices
    fronts: list[dict[_State, list[_Node]]] = [{} for _ in range(num_layers + 1)]
    for first in range(num_layers - 1, -1, -1):
        grown: dict[_State, list[_Node]] = defaultdict(list)
        for replicas in question.replicas:
            if replicas <= num_devices:
                _grow_last(question, objective, first, replicas, grown)
                _grow(question, objective, fronts, first, replicas, grown)
        fronts[first] = {state: _front(nodes, objective, state[1], width) for state, nodes in grown.items()}
    return fronts[0]


def _grow_last(
    question: Question, objective: PartitionObjective, first: int, replicas: int, grown: dict[_State, list[_Node]]
) -> None:
    """Add to `grown` the suffix whose only stage has all layers from `first` on, if that stage is allowed."""
    before = question.num_devices - replicas  # devices that are left for the stages before
    if not _can_precede(question, first, before):
        return
    times = question.stage(first, question.num_layers, before, replicas, 1)
    if times is None:
        return
    numbers = objective.prepend(None, times, (0.0, 0.0))
    if question.is_hopeless is None or not question.is_hopeless(numbers, 1, first, before):
        grown[replicas, 1, replicas].append((numbers, first, replicas, None))  # [1]


def _grow(
    question: Question,
    objective: PartitionObjective,
    fronts: Sequence[dict[_State, list[_Node]]],
    first: int,
    replicas: int,
    grown: dict[_State, list[_Node]],
) -> None:
    """Add to `grown` each suffix that begins with a stage at layer `first`, before a suffix of `fronts` that fits."""
    stage, link, prepend, is_hopeless = question.stage, question.link, objective.prepend, question.is_hopeless
    closed: set[tuple[int, int]] = set()  # (devices, stages) after which not even a shorter stage was allowed
    may_precede = [_can_precede(question, first, devices) for devices in range(question.num_devices + 1)]
    last = question.longest(first, replicas) if question.longest else question.num_layers
    for stop in range(first + 1, min(last + 1, question.num_layers)):
        for (behind, stages, receivers), nodes in fronts[stop].items():
            position = question.num_devices - behind - replicas
            if position < 0 or not may_precede[position]:
                continue
            if stages >= question.max_stages or (behind, stages) in closed:
                continue
            times = stage(first, stop, position, replicas, stages + 1)
            if times is None:
                # `stop` grows, so all further stages here are longer, and not allowed either.
                closed.add((behind, stages))
                continue
            transfer = link(stop, position + replicas, replicas, receivers)
            state = behind + replicas, stages + 1, replicas
            for node in nodes:
                numbers = prepend(node[0], times, transfer)
                if is_hopeless is None or not is_hopeless(numbers, stages + 1, first, position):
                    grown[state].append((numbers, first, replicas, node))  # [2]


def _can_precede(question: Question, first: int, devices: int) -> bool:
    """Whether the layers before `first` can make stages on `devices` devices, the ones before the suffix."""
    # All layers are taken exactly when all devices are.
    if not first or not devices:
        return not first and not devices
    return devices >= min(question.replicas) and question.reach(first, devices)


def _front(nodes: list[_Node], objective: PartitionObjective, stages: int, width: int) -> list[_Node]:
    """The suffixes of one state that no other beats in all numbers, at most `width`: the ones with the best values.

    `stages`: the number of stages of each.
    """
    nodes.sort(key=lambda node: node[0])  # stable: earlier found, that is shorter first stages, win ties
    kept: list[_Node] = []
    for node in nodes:
        numbers = node[0]
        if not any(all(map(le, other[0], numbers)) for other in kept):
            kept.append(node)  # [3]
    if len(kept) > width:
        kept = sorted(kept, key=lambda node: objective.value(node[0], stages))[:width]
    return kept


def _starts(node: _Node) -> tuple[int, ...]:
    return (node[1], *(_starts(node[3]) if node[3] else ()))


def _replicas(node: _Node) -> tuple[int, ...]:
    return (node[2], *(_replicas(node[3]) if node[3] else ()))

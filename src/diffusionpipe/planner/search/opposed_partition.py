"""Cuts two backbones into stages that share their devices, by a dynamic program over both at once.

    devices       0        1        2          a state: layers [i, L) of the first and [0, j) of the second backbone
    first    -->  0 1 2  | 3 4    | 5 6 [2]    are on the last d devices; each device block that is put before them
    second   <--  4 5    | 2 3    | 0 1 [1]    adds a stage [i', i) of the one and a stage [j, j') of the other

The backbones run in opposite directions: the first down the devices, the second up. Both have as many stages, and
stages on the same devices have as many replicas (DiffusionPipe, Tian et al., MLSys 2024, on cascaded models). For two
backbones in the same direction the second one's layers are counted from its end.

As in `dynamic_program`, an objective says which few numbers describe a state; a state keeps those that no other beats
in all of them. The dearest stage of a backbone does not say how busy a device is: a dear stage of one beside a cheap
one of the other is as good as two of middle size. So our objectives count the load of a device, the paper's does not.

    layers of 1 and 5, and of 5 and 1, two devices, one micro-batch of each: both backbones are cut after their first
    layer, and put 1 + 1 and 5 + 5 on the devices in opposite directions, with 1 + 5 and 5 + 1 in the same [3]

>>> from diffusionpipe.planner.search.pair_objectives import OppositeLoads, SameLoads
>>> layers = ((1, 5), (5, 1))
>>> def question(*ways):
...     return TwoSidedQuestion(
...         num_layers=(2, 2), num_devices=2, replicas=(1,), cap=12, work=((0, 0, 0), (0, 0, 0)),
...         stage=lambda backbone, first, stop, *_: (sum(ways[backbone][first:stop]), 0, 0),
...         link=lambda *_: (0, 0),
...     )
>>> opposite = best_pairs(question(*layers), OppositeLoads((1, 1)))
>>> [(pair.starts, pair.numbers[0]) for pair in opposite]
[(((0, 1), (0, 1)), 10)]
>>> [pair.numbers[0] for pair in best_pairs(question(layers[0], layers[1][::-1]), SameLoads((1, 1)))]
[6]
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import le
from typing import TypeAlias

from diffusionpipe.planner.search.constants import (
    CAP_STEP,
    EFFORT,
    FEW_LAYERS,
    FEW_STATES,
    MORE_LAYERS,
    NEAR,
    PAIR_SLACK,
    QUICK_EFFORT,
)
from diffusionpipe.planner.search.dynamic_program import Numbers, StageTime
from diffusionpipe.planner.search.pair_objectives import Links, PairObjective
from diffusionpipe.planner.search.two_sided import PairPartition, TwoSidedQuestion
from diffusionpipe.units import Seconds

_Node: TypeAlias = tuple[Numbers, int, int, int, "_Node | None"]
"""(numbers of a state, i, j, replicas of its first device block, the state after that block or None)."""
_State: TypeAlias = tuple[int, int, int, int]
"""(i, j, number of device blocks, replicas of the first one)."""


def best_pairs(
    question: TwoSidedQuestion,
    objective: PairObjective,
    *,
    width: int = 16,
    limit: Seconds = float("inf"),
    effort: float = float("inf"),
) -> tuple[PairPartition, ...]:
    """The pairs of partitions that no pair of as many blocks beats in every number, best value first; () if none fits.

    At most `width` pairs are kept for each number of blocks and replicas of the first block. The first pair is optimal
    among the pairs under the cap as long as no front is longer than `width`. Ties are broken by fewer blocks, then by
    earlier starts. States that can only become worse than the limit are not looked at. () also if more than `effort`
    states would be looked at.
    """
    return _pairs_of(_Program(question, objective, width, limit, effort))


def _pairs_of(program: "_Program") -> tuple[PairPartition, ...]:
    """The pairs of partitions that a program finds, best value first."""
    value = program.objective.value
    found = [
        PairPartition(starts=_starts(node), replicas=_replicas(node), value=value(node[0], blocks), numbers=node[0])
        for (_, _, blocks, _), nodes in program.run().items()
        for node in nodes
    ]
    return tuple(sorted(found, key=lambda pair: (pair.value, len(pair.replicas), pair.starts, pair.replicas)))


def first_pairs(
    question: TwoSidedQuestion, objective: PairObjective, *, width: int, effort: float = float("inf")
) -> tuple[PairPartition, ...]:
    """The best pairs of partitions under the smallest cap under which any fit, best first; () if none is found.

    The cap starts a little above the even share and is raised faster and faster until something is found, but never
    beyond the question's own. If memory refuses the pairs under the first caps, many states are looked at: with more
    than `effort` of them in all, nothing is found.
    """
    first, second = question.work
    cap, step = PAIR_SLACK * objective.load(first[-1], second[-1]) / question.num_devices, CAP_STEP
    while True:
        program = _Program(replace(question, cap=min(cap, question.cap)), objective, width, float("inf"), effort)
        found = _pairs_of(program)
        if found or cap >= question.cap or program.left < 0:
            return found
        cap, step, effort = cap * step, step * CAP_STEP, program.left


def bounded_pairs(question: TwoSidedQuestion, objective: PairObjective, *, width: int) -> tuple[PairPartition, ...]:
    """The best pairs of partitions and others within 1 % of them, best first, for any cap; () if none fits.

    Branch and bound: the value of a pair found with fewer places to cut is the limit of the next search. Without limits
    almost all pairs would have to be looked at, because a busier device may have a shorter ramp. If there are still too
    many, because sums of gradients outlast the ramps, some places to cut are left out.
    """
    found, places = quick_pairs(question, objective), _few(question)
    if not found:
        return ()
    for more in sorted({max(places, MORE_LAYERS), max(question.num_layers)}):  # more places to cut, then every layer
        better = _cut_at(question, objective, more, limit=found[0].value)
        if not better:
            break
        found, places = better, more
    return _cut_at(question, objective, places, width=width, limit=found[0].value * NEAR) or found


def quick_pairs(question: TwoSidedQuestion, objective: PairObjective) -> tuple[PairPartition, ...]:
    """The best pairs of partitions with cuts at only some layers; if there are none, the first that fit."""
    places = _few(question)
    coarse, ends = _coarse(question, places)
    first = first_pairs(coarse, objective, width=1)
    if not first:
        return first_pairs(question, objective, width=1, effort=QUICK_EFFORT)
    return _cut_at(question, objective, places, limit=first[0].value) or _of_layers(first, *ends)


def _few(question: TwoSidedQuestion) -> int:
    """The number of layers of each backbone in a quick question; over fewer devices it may have more of them."""
    return max(FEW_LAYERS, FEW_STATES // question.num_devices)


def _cut_at(
    question: TwoSidedQuestion, objective: PairObjective, num_layers: int, *, limit: Seconds, width: int = 1
) -> tuple[PairPartition, ...]:
    """The best pairs of partitions within `limit`, with each backbone's layers joined to at most `num_layers`.

    () if there is none, or if the search takes more than `EFFORT`.
    """
    coarse, ends = _coarse(question, num_layers)
    return _of_layers(best_pairs(coarse, objective, width=width, limit=limit, effort=EFFORT), *ends)


def _of_layers(
    pairs: Sequence[PairPartition], first: Sequence[int], second: Sequence[int]
) -> tuple[PairPartition, ...]:
    """The pairs of a coarse question with the numbers of the layers themselves as first layers.

    `first`, `second`: the layer at which each joined layer of a backbone begins.
    """
    return tuple(
        replace(pair, starts=(tuple(first[k] for k in pair.starts[0]), tuple(second[k] for k in pair.starts[1])))
        for pair in pairs
    )


def _coarse(question: TwoSidedQuestion, num_layers: int) -> tuple[TwoSidedQuestion, tuple[list[int], list[int]]]:
    """(question with neighbouring layers joined until each backbone has `num_layers`, borders of the joined layers).

    The borders are the first layer of each joined layer, by backbone, and the number of all layers at the end.
    """
    ends = _ends(question.work[0], num_layers), _ends(question.work[1], num_layers)

    def layers(backbone: int, span: tuple[int, int]) -> tuple[int, int]:
        return ends[backbone][span[0]], ends[backbone][span[1]]

    first, second = ([work[k] for k in own] for work, own in zip(question.work, ends, strict=True))
    joined = replace(
        question,
        num_layers=(len(first) - 1, len(second) - 1),
        stage=lambda b, start, stop, *place: question.stage(b, *layers(b, (start, stop)), *place),
        link=lambda b, cut, *place: question.link(b, ends[b][cut], *place),
        work=(first, second),
        fits=lambda one, other, *place: question.fits(layers(0, one), layers(1, other), *place),
    )
    return joined, ends


def _ends(work: Sequence[Seconds], num_layers: int) -> list[int]:
    """The layers before which a backbone may be cut, both its ends included: neighbours that take least are joined.

    `work`: running sums of the layers' seconds.
    """
    ends = list(range(len(work)))
    while len(ends) > num_layers + 1:
        del ends[min(range(1, len(ends) - 1), key=lambda k: work[ends[k + 1]] - work[ends[k - 1]])]
    return ends


class _Program:
    """One run of the dynamic program, which grows the states of d devices from the states of fewer devices."""

    def __init__(
        self, question: TwoSidedQuestion, objective: PairObjective, width: int, limit: Seconds, effort: float
    ) -> None:  # fmt: skip
        self.question, self.objective, self.width, self.limit = question, objective, width, limit
        self.left = effort
        """The number of states that the program may still look at; negative: it gave up."""

    def run(self) -> dict[_State, list[_Node]]:
        """State in which all devices have stages -> its front; {} if the program gave up."""
        num_devices, num_layers = self.question.num_devices, self.question.num_layers[0]
        grown: list[dict[_State, list[_Node]]] = [defaultdict(list) for _ in range(num_devices + 1)]
        # No layer is on a device yet. Without nodes, as no block has numbers.
        start: dict[_State, list[_Node]] = {(num_layers, 0, 0, 0): []}
        for devices in range(num_devices):
            fronts = {state: self._front(nodes, state[2]) for state, nodes in grown[devices].items() if nodes}
            for replicas in self.question.replicas:
                if devices + replicas <= num_devices:
                    self._grow(fronts if devices else start, devices, replicas, grown[devices + replicas])
                    if self.left < 0:
                        return {}
        return {state: self._front(nodes, state[2]) for state, nodes in grown[num_devices].items() if nodes}

    def _grow(
        self, fronts: dict[_State, list[_Node]], devices: int, replicas: int, grown: dict[_State, list[_Node]]
    ) -> None:
        """Put a block of `replicas` devices before every state of `devices` devices, and add the results to `grown`."""
        position = self.question.num_devices - devices - replicas
        prepend, tables = self.objective.prepend, _Tables(self.question, position, replicas)
        for (i, j, blocks, receivers), nodes in fronts.items():
            links = tables.links(i, j, receivers) if nodes else _NO_LINKS
            open_nodes = [(node, self._cap(node, i, j, blocks, position + replicas)) for node in nodes or (None,)]
            widest = max(cap for _, cap in open_nodes)
            for before, first, behind, second in self._spans(tables, i, j, blocks, position, widest):
                bucket = grown[before, behind, blocks + 1, replicas]
                self.left -= len(open_nodes)
                if self.left < 0:
                    return
                for node, cap in open_nodes:
                    numbers = prepend(node[0] if node else None, (first, second), links, is_whole=not position)
                    if numbers[0] <= cap:
                        bucket.append((numbers, before, behind, replicas, node))

    def _cap(self, node: _Node | None, i: int, j: int, blocks: int, devices: int) -> Seconds:
        """The largest load of a device with which a state can still lead to a pair within the limit.

        The layers [0, i) of the first and [j, L) of the second backbone are left for the `devices` devices before it.
        """
        question, (first, second) = self.question, self.question.work
        cap = question.cap
        if self.limit < float("inf"):
            most = min(max(question.replicas), devices)
            left = first[i] / most, (second[-1] - second[j]) / most
            stages = blocks - (-devices // most)  # rounded up: a block takes `most` devices at most
            cap = min(cap, self.objective.cap(node[0] if node else None, left, stages, self.limit))
        return cap * (1 + 1e-12)  # a load just at the cap stays allowed in spite of rounding

    def _spans(
        self, tables: "_Tables", i: int, j: int, blocks: int, position: int, cap: Seconds
    ) -> Iterator[tuple[int, StageTime, int, StageTime]]:
        """(i', stage [i', i) of the first backbone, j', stage [j, j') of the second) of each block before a state.

        Load and memory allow these stages, and the devices before them can finish the rest under the cap.
        """
        question, last, load = self.question, self.question.num_layers[1], self.objective.load
        # The block that comes first takes all layers that are left.
        for before in range(i - 1, 0, -1) if position else (0,):
            first = tables.stage(0, before, i)
            time = first[0] + first[1]
            # The further the stage reaches, the longer it takes: no other one is under the cap.
            if load(time, 0) > cap:
                return
            self.left -= 1  # where memory refuses every j', looking for one is all the effort
            if self.left < 0:
                return
            # The `position` devices before these must finish the rest under the cap.
            least = max(j + 1, self._least_end(before, cap * position))
            for behind in range(least, last) if position else (last,):
                second = tables.stage(1, j, behind)
                if load(time, second[0] + second[1]) > cap:
                    break
                if not question.fits((before, i), (j, behind), position, tables.replicas, blocks + 1):
                    break
                yield before, first, behind, second

    def _least_end(self, before: int, limit: Seconds) -> int:
        """The least j' with which the work that is left, of [0, before) and [j', L), is at most `limit`."""
        first, second = self.question.work
        load, done = self.objective.load, range(len(second))
        return bisect_left(done, True, key=lambda j: load(first[before], second[-1] - second[j]) <= limit)

    def _front(self, nodes: list[_Node], blocks: int) -> list[_Node]:
        """The nodes of a state that no other beats in all numbers, at most `width`: the ones with the best values."""
        if len(nodes) == 1:
            return nodes
        value = self.objective.value
        kept: list[_Node] = []
        # A state comes after the states that beat it.
        for _, numbers, index in sorted((value(node[0], blocks), node[0], k) for k, node in enumerate(nodes)):
            for other in kept:
                if all(map(le, other[0], numbers)):
                    break
            else:
                kept.append(nodes[index])
                if len(kept) == self.width:
                    break
        return kept


_NO_LINKS: Links = ((0.0, 0.0), (0.0, 0.0))


@dataclass(frozen=True)
class _Tables:
    """The times of stages and links of one device block, each of which is asked for once."""

    question: TwoSidedQuestion
    position: int
    replicas: int

    @cached_property
    def stage(self) -> Callable[[int, int, int], StageTime]:
        """A function that gives a stage's times for a micro-batch."""
        ask, place = self.question.stage, (self.position, self.replicas)
        return lru_cache(maxsize=None)(lambda backbone, first, stop: ask(backbone, first, stop, *place))

    def links(self, i: int, j: int, receivers: int) -> Links:
        """The transfers of both backbones between this block and the next one, of `receivers` devices."""
        link, behind = self.question.link, self.position + self.replicas
        return link(0, i, behind, self.replicas, receivers), link(1, j, behind, self.replicas, receivers)


def _chain(node: _Node | None) -> Iterator[_Node]:
    while node:
        yield node
        node = node[4]


def _starts(node: _Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    chain = list(_chain(node))
    return tuple(one[1] for one in chain), (0, *(one[2] for one in reversed(chain[1:])))


def _replicas(node: _Node) -> tuple[int, ...]:
    return tuple(one[3] for one in _chain(node))

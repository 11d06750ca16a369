"""Cuts for V-shaped placements that keep both ends of a U-Net's skips on one rank.

    layers     0 1 2 3 4 5 | 6 7 8 9 10 11        a skip leads from layer i to layer 11 - i
    rank 0     0 1                    10 11       rings of the folded model: rank r holds stage r and stage 2p - 1 - r
    rank 1         2 3            8 9
    rank 2             4 5 | 6 7

PULSE (2026) collocates skips so. A rank's time is the sum of both its stages, which need not be equal.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.units import Bytes, Seconds

SLACK = 0.05
"""The part by which the slowest rank may exceed the time that the best balance gives it."""
STEP = 1.1
"""The factor by which the limit of a rank's time grows, from an equal share of all time, until some cut keeps to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """One rank's layers: [start, inner_start) on the way down and [inner_stop, stop) on the way up."""

    start: int
    inner_start: int
    inner_stop: int
    stop: int


def folded_cuts(graph: ModelGraph, times: Sequence[Seconds], num_ranks: int) -> tuple[int, ...]:
    """The index of the first trained layer of each of the 2p stages of a V, with few bytes sent between ranks.

    Of the cuts whose slowest rank is within `SLACK` of the best balance, the one with the fewest bytes sent.

    Args:
        graph: the model.
        times: seconds of each trained layer, forward and backward.
        num_ranks: the number of ranks, p.

    Raises:
        ConfigError: fewer than 2p trained layers.
    """
    size = len(graph.backbone_layers)
    if len(times) != size:
        raise ConfigError(f"{len(times)} times for {size} trained layers; give one for each")
    if size < 2 * num_ranks:
        raise ConfigError(
            f"{2 * num_ranks} stages need {2 * num_ranks} trained layers, but there are {size}; use fewer ranks"
        )
    before = list(accumulate(times, initial=0.0))
    between = _between(size, _sent(graph))
    best, limit = inf, before[-1] / num_ranks
    # The first limit may be too tight for whole layers.
    while best == inf:  # nothing is left out by a limit that some cut keeps to
        limit *= STEP
        best, _ = _search(num_ranks, before, between, limit=limit, by_time=True)
    _, rings = _search(num_ranks, before, between, limit=best * (1 + SLACK), by_time=False)
    return (*(ring.start for ring in rings), *(ring.inner_stop for ring in reversed(rings)))


def is_folded(workers: Sequence[int]) -> bool:
    """Whether stages on these workers, in forward order, go down all workers once and up again: a V."""
    half = len(workers) // 2
    return half > 0 and tuple(workers) == (*range(half), *reversed(range(half)))


def stage_starts(graph: ModelGraph, times: Sequence[Seconds], workers: Sequence[int]) -> tuple[int, ...]:
    """The index of the first trained layer of each stage, for stages on these workers in forward order.

    The stages take about equal times. For a V and a model with skips they are cut by `folded_cuts`.

    Raises:
        ConfigError: more stages than trained layers.
    """
    if is_folded(workers) and len(times) >= len(workers) and any(b > a + 1 for a, b, _ in _sent(graph)):
        return folded_cuts(graph, times, len(workers) // 2)
    return balanced_cuts(times, len(workers))


def _sent(graph: ModelGraph) -> list[tuple[int, int, Bytes]]:
    """(layer that writes, layer that reads, bytes a sample there and back) of every tensor between trained layers."""
    names = graph.backbone_layers
    position = {name: i for i, name in enumerate(names)}
    layers = {layer.name: layer for layer in graph.layers if layer.name in position}
    writer = {tensor: position[name] for name, layer in layers.items() for tensor in layer.writes}
    found = []
    for name, layer in layers.items():
        for tensor in layer.reads:
            if tensor in writer:
                spec = graph.tensor(tensor)
                found.append((writer[tensor], position[name], spec.num_bytes * (2 if spec.needs_gradient else 1)))
    return found


def _between(size: int, sent: Sequence[tuple[int, int, Bytes]]) -> list[list[Bytes]]:
    """A table of bytes for each sample: entry [i][j] has the bytes that layers before i send to layers before j."""
    table = [[0] * (size + 1) for _ in range(size + 1)]
    for writer, reader, num_bytes in sent:
        table[writer + 1][reader + 1] += num_bytes
    for i in range(1, size + 1):
        row = list(accumulate(table[i]))
        table[i] = [above + own for above, own in zip(table[i - 1], row, strict=True)]
    return table


def _search(
    num_ranks: int,
    before: Sequence[Seconds],
    between: Sequence[Sequence[Bytes]],
    *,
    limit: Seconds,
    by_time: bool,
) -> tuple[float, list[_Ring]]:
    """(time of the slowest rank or bytes sent, the rings from outside to inside) of the cut with the least.

    `by_time` asks for the time, else for the bytes. No rank takes longer than `limit`; (inf, []) if no cut keeps to it.
    Among equal cuts it is the one whose ranks' two stages take most nearly the same time, as V-shaped schedules want
    it.

    Args:
        num_ranks: the number of ranks.
        before: seconds of all layers before layer i, for each i.
        between: the table of `_between`.
        limit: the most seconds of a rank.
        by_time: whether the time of the slowest rank is to be least, and not the bytes.
    """
    # A cut that is just at the limit stays in, in spite of rounding.
    size, limit = len(before) - 1, limit * (1 + 1e-12)

    def flow(start: int, stop: int, first: int, last: int) -> Bytes:
        """Bytes from the layers [start, stop) to the layers [first, last)."""
        return between[stop][last] - between[start][last] - between[stop][first] + between[start][first]

    def leaving(ring: _Ring) -> Bytes:
        """Bytes that the ring and the rings inside of it send to each other."""
        inner = (ring.inner_start, ring.inner_stop)
        return flow(ring.start, ring.inner_start, *inner) + flow(*inner, ring.inner_stop, ring.stop)

    # (first layer inside, first layer on the way up) -> the best rings around these layers: (worst, differences),
    # rings.
    states: dict[tuple[int, int], tuple[tuple[float, float], list[_Ring]]] = {(0, size): ((0.0, 0.0), [])}
    for left in range(num_ranks - 1, -1, -1):
        following: dict[tuple[int, int], tuple[tuple[float, float], list[_Ring]]] = {}
        for (start, stop), ((cost, differences), rings) in states.items():
            for ring in _rings(before, start, stop, left, limit):
                down, up = before[ring.inner_start] - before[start], before[stop] - before[ring.inner_stop]
                worst = max(cost, down + up) if by_time else cost + leaving(ring)
                total = (worst, differences + abs(down - up))
                key = (ring.inner_start, ring.inner_stop)
                if key not in following or total < following[key][0]:
                    following[key] = (total, [*rings, ring])
        states = following
    if not states:
        return inf, []
    (least, _), rings = min(states.values(), key=lambda state: state[0])
    return least, rings


def _rings(before: Sequence[Seconds], start: int, stop: int, left: int, limit: Seconds) -> Iterator[_Ring]:
    """Each ring that a rank may take off both ends of the layers [start, stop) so that `left` ranks can do the rest.

    No rank takes longer than `limit`. `before`: seconds of all layers before layer i, for each i.
    """
    for inner_start in range(start + 1, stop - 2 * left):
        down = before[inner_start] - before[start]
        if down > limit:
            return
        # What goes up stays within the limit, and what is inside can be done by the others within theirs.
        earliest = max(inner_start + 2 * left, bisect_left(before, before[stop] + down - limit))
        # The innermost ring takes all layers that are left: its way up begins where its way down ends.
        for inner_stop in range(earliest, min(stop, inner_start + 1 if left == 0 else stop)):
            if before[inner_stop] - before[inner_start] > left * limit:  # and it grows with `inner_stop`
                break
            yield _Ring(start=start, inner_start=inner_start, inner_stop=inner_stop, stop=stop)

"""Cuts for V-shaped placements that keep both ends of a U-Net's skips on one rank.

    layers     0 1 2 3 4 5 | 6 7 8 9 10 11        a skip leads from layer i to layer 11 - i
    rank 0     0 1                    10 11       rings of the folded model: rank r holds stage r and stage 2p - 1 - r
    rank 1         2 3            8 9
    rank 2             4 5 | 6 7

PULSE (2026) collocates skips so. A rank's time is that of both its stages, which need not be equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.partition import balanced_cuts
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """One rank's layers: [start, inner_start) on the way down and [inner_stop, stop) on the way up."""

    start: int
    inner_start: int
    inner_stop: int
    stop: int


def folded_cuts(graph: ModelGraph, times: Sequence[Seconds], num_ranks: int, *, slack: float = 0.05) -> tuple[int, ...]:
    """Where each of the 2p stages starts among the trained layers, the fewest bytes sent at nearly the best balance.

    Args:
        graph: the model.
        times: seconds of each trained layer, forward and backward.
        num_ranks: p.
        slack: by how much the slowest rank may exceed the time that the best balance gives it.

    Raises:
        ConfigError: fewer than 2p trained layers.
    """
    size = len(graph.backbone_layers)
    if len(times) != size:
        raise ConfigError(f"{len(times)} times for {size} trained layers; give one for each")
    if size < 2 * num_ranks:
        raise ConfigError(f"{2 * num_ranks} stages need as many trained layers; there are {size}: use fewer ranks")
    before = [0.0]
    for time in times:
        before.append(before[-1] + time)
    sent = _sent(graph)
    best, _ = _search(size, num_ranks, before, sent, limit=inf, by_time=True)
    _, rings = _search(size, num_ranks, before, sent, limit=best * (1 + slack), by_time=False)
    return (*(ring.start for ring in rings), *(ring.inner_stop for ring in reversed(rings)))


def is_folded(workers: Sequence[int]) -> bool:
    """Whether stages on these workers, in forward order, go down all of them once and up again."""
    half = len(workers) // 2
    return half > 0 and tuple(workers) == (*range(half), *reversed(range(half)))


def stage_starts(graph: ModelGraph, times: Sequence[Seconds], workers: Sequence[int]) -> tuple[int, ...]:
    """Where each stage starts among the trained layers, for stages on these workers in forward order.

    Balanced by time; for a V and a model with skips, folded.

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


def _search(
    size: int,
    num_ranks: int,
    before: Sequence[Seconds],
    sent: Sequence[tuple[int, int, Bytes]],
    *,
    limit: Seconds,
    by_time: bool,
) -> tuple[float, list[_Ring]]:
    """The rings from outside to inside with the least slowest time or, with ranks below `limit`, bytes sent.

    Among equal ones those whose two stages take most nearly the same time, as V-shaped schedules want it.
    """

    def time(ring: _Ring) -> Seconds:
        return before[ring.inner_start] - before[ring.start] + before[ring.stop] - before[ring.inner_stop]

    def difference(ring: _Ring) -> Seconds:
        down, up = before[ring.inner_start] - before[ring.start], before[ring.stop] - before[ring.inner_stop]
        return abs(down - up)

    def leaving(ring: _Ring) -> Bytes:
        """Bytes between the ring and the rings inside of it."""
        inner = range(ring.inner_start, ring.inner_stop)
        own = (*range(ring.start, ring.inner_start), *range(ring.inner_stop, ring.stop))
        return sum(
            size
            for writer, reader, size in sent
            if (writer in own and reader in inner) or (writer in inner and reader in own)
        )

    states: dict[tuple[int, int], tuple[tuple[float, float], list[_Ring]]] = {(0, size): ((0.0, 0.0), [])}
    for rank in range(num_ranks):
        left = num_ranks - rank - 1
        following: dict[tuple[int, int], tuple[tuple[float, float], list[_Ring]]] = {}
        for (start, stop), ((cost, differences), rings) in states.items():
            for inner_start in range(start + 1, stop - 2 * left):
                for inner_stop in range(inner_start + 2 * left, stop):
                    if left == 0 and inner_stop != inner_start:
                        break
                    ring = _Ring(start=start, inner_start=inner_start, inner_stop=inner_stop, stop=stop)
                    if time(ring) > limit:
                        continue
                    worst = max(cost, time(ring)) if by_time else cost + leaving(ring)
                    total = (worst, differences + difference(ring))
                    key = (inner_start, inner_stop)
                    if key not in following or total < following[key][0]:
                        following[key] = (total, [*rings, ring])
        states = following
    (least, _), rings = min(states.values(), key=lambda state: state[0])
    return least, rings

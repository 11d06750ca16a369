"""Local search on finished fills: what lies on the critical path moves to other places."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.planner.fill_graph import ComputeGraph
from diffusionpipe.planner.fill_queue import Piece
from diffusionpipe.planner.fill_shares import CLOSE, Case, Packing, Visits, bound_of
from diffusionpipe.units import Seconds

REACH = 4
"""Places tried to either side."""

Pieces = tuple[Piece, ...]
Place = tuple[int, int]
"""Worker and position in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """An evaluation of all workers' pieces."""

    makespan: Seconds
    critical: tuple[Place, ...]
    """Places with fills on the critical path, the latest first."""
    ends: tuple[Seconds, ...]
    """End of each worker's order."""
    is_shifted: bool


def polished(case: Case, packing: Packing, visits: Visits) -> Packing:
    """The packing after moving pieces on its critical path while that helps and the budget lasts.

    A move keeps the order of a worker's pieces, so layers stay in order: it takes the last of the pieces at a place,
    or one sample of the last, to a later place, or the first to an earlier one. Shares stay.
    """
    pieces = [_by_layer(own) for own in packing.pieces]
    places = [places_of(case.graph, worker) for worker in range(case.graph.num_workers)]
    timed = _timed(case, pieces)
    bound = bound_of(case, packing)
    size = len(case.graph.worker) + sum(len(own) for own in pieces)
    is_better = True
    while is_better and visits.left > 0 and timed.makespan > bound * CLOSE:
        is_better = False
        for worker, moved in _moves(pieces, places, timed.critical):
            trial = [*pieces[:worker], moved, *pieces[worker + 1 :]]
            found = _timed(case, trial)
            visits.left -= size
            if found.makespan < timed.makespan * (1 - 1e-9):
                pieces, timed, is_better = trial, found, True
                break
            if visits.left <= 0:
                break
    return packing if timed.makespan >= packing.makespan else _packing(case, packing, pieces, timed)


def retimed(case: Case, packing: Packing, pieces: Sequence[Pieces]) -> Packing:
    """The packing with other pieces."""
    return _packing(case, packing, pieces, _timed(case, pieces))


def _packing(case: Case, packing: Packing, pieces: Sequence[Pieces], timed: _Timed) -> Packing:
    last = case.frozen.num_layers
    return replace(
        packing,
        shares=tuple(sum(b - a for _, _, stop, a, b in own if stop == last) for own in pieces),
        pieces=tuple(list(own) for own in pieces),
        ends=timed.ends,
        used=tuple(sum(_seconds(case, w, piece) for piece in own) for w, own in enumerate(pieces)),
        makespan=timed.makespan,
        is_shifted=timed.is_shifted,
    )


def _by_layer(pieces: Sequence[Piece]) -> Pieces:
    """One piece for each layer."""
    return tuple((at, layer, layer + 1, a, b) for at, first, stop, a, b in pieces for layer in range(first, stop))


def places_of(graph: ComputeGraph, worker: int) -> list[int]:
    """Positions in a worker's order before which work can stand: its computes, and the end."""
    own = [p for w, p in zip(graph.worker, graph.position, strict=True) if w == worker]
    return [*own, graph.lengths[worker]]


def _seconds(case: Case, worker: int, piece: Piece) -> Seconds:
    _, layer, stop, first, last = piece
    running = case.frozen.running(last - first)
    return (case.options.overhead + running[stop] - running[layer]) / case.options.speed(worker)


def _timed(case: Case, pieces: Sequence[Pieces]) -> _Timed:
    graph = case.graph
    room: dict[Place, Seconds] = {}
    for worker, own in enumerate(pieces):
        for piece in own:
            key = worker, piece[0]
            room[key] = room.get(key, 0.0) + _seconds(case, worker, piece)
    host = [0.0] * graph.num_workers
    latest = [-1] * graph.num_workers
    ends: list[Seconds] = []
    reason: list[int] = []  # the node that each waited for, -1 for none
    on_host: list[bool] = []
    for node, worker in enumerate(graph.worker):
        start, why, is_host = 0.0, -1, False
        if worker >= 0:
            start, why, is_host = host[worker] + room.get((worker, graph.position[node]), 0.0), latest[worker], True
        for source, lag in graph.inputs[node]:
            if ends[source] + lag > start:
                start, why, is_host = ends[source] + lag, source, False
        end = start + graph.seconds[node]
        ends.append(end)
        reason.append(why)
        on_host.append(is_host)
        if worker >= 0:
            host[worker], latest[worker] = end, node
    tails = [host[w] + room.get((w, graph.lengths[w]), 0.0) for w in range(graph.num_workers)]
    critical: list[Place] = []
    last = max(range(graph.num_workers), key=lambda w: tails[w])
    makespan = max(tails[last], max(ends))
    if tails[last] >= makespan:
        node = latest[last]
        critical.append((last, graph.lengths[last]))
    else:
        node = max(range(len(ends)), key=lambda n: ends[n])
    while node >= 0:
        if on_host[node]:
            critical.append((graph.worker[node], graph.position[node]))
        node = reason[node]
    return _Timed(
        makespan=makespan,
        critical=tuple(place for place in critical if place in room),
        ends=tuple(tails),
        is_shifted=any(end > early * (1 + 1e-12) for end, early in zip(ends, graph.earliest, strict=True)),
    )


def _moves(
    pieces: Sequence[Pieces], places: Sequence[list[int]], critical: Sequence[Place]
) -> Iterator[tuple[int, Pieces]]:
    """(worker, its pieces after a move), the cheapest moves first."""
    for worker, position in critical:
        own = pieces[worker]
        here = [i for i, piece in enumerate(own) if piece[0] == position]
        index = places[worker].index(position)
        first, stop = here[0], here[-1] + 1
        for later in places[worker][index + 1 : index + 1 + REACH]:
            for cut in range(stop - 1, first - 1, -1):
                yield worker, _merged((*own[:cut], *_raised(own[cut:], later)))
                if (parts := _split(own[cut], -1)) is not None:
                    yield worker, _merged((*own[:cut], parts[0], *_raised((parts[1], *own[cut + 1 :]), later)))
        for earlier in reversed(places[worker][max(0, index - REACH) : index]):
            for cut in range(first + 1, stop + 1):
                yield worker, _merged((*_lowered(own[:cut], earlier), *own[cut:]))
                if (parts := _split(own[cut - 1], 1)) is not None:
                    yield worker, _merged((*_lowered((*own[: cut - 1], parts[0]), earlier), parts[1], *own[cut:]))


def _raised(pieces: Pieces, position: int) -> Pieces:
    return tuple((max(piece[0], position), *piece[1:]) for piece in pieces)


def _lowered(pieces: Pieces, position: int) -> Pieces:
    return tuple((min(piece[0], position), *piece[1:]) for piece in pieces)


def _split(piece: Piece, count: int) -> tuple[Piece, Piece] | None:
    """The piece without its last sample (-1) or its first one (1), and that sample; None for a single one."""
    at, layer, stop, first, last = piece
    if last - first < 2:
        return None
    cut = last - 1 if count < 0 else first + 1
    return (at, layer, stop, first, cut), (at, layer, stop, cut, last)


def _merged(pieces: Pieces) -> Pieces:
    """Neighbours of one layer and place as one piece."""
    found: list[Piece] = []
    for piece in pieces:
        at, layer, stop, first, last = piece
        if found and found[-1][:3] == (at, layer, stop) and found[-1][4] == first:
            found[-1] = (at, layer, stop, found[-1][3], last)
        else:
            found.append(piece)
    return tuple(found)

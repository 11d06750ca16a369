"""A local search on finished fills, which moves fills on the critical path to other places."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.planner.filling.compute_graph import Place
from diffusionpipe.planner.filling.fill_queue import Piece
from diffusionpipe.planner.filling.shares import CLOSE, Case, Packing, Visits, bound_of
from diffusionpipe.units import Seconds

REACH = 4
"""The number of places to either side to which a fill may move at a time."""

Pieces = tuple[Piece, ...]
NO_PLACE: Place = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """The times of an iteration with the pieces of all workers at their places."""

    makespan: Seconds
    critical: tuple[Place, ...]
    """The places, (worker, position), with fills on the critical path, the latest first."""
    ends: tuple[Seconds, ...]
    """The end of each worker's order, by worker, in seconds."""
    is_shifted: bool


def polished(case: Case, packing: Packing, visits: Visits) -> Packing:
    """The packing after moving pieces on its critical path while that shortens it and the budget of visits lasts.

    A move keeps the order of a worker's pieces, so layers stay in order: it takes the last of the pieces at a place, or
    one sample of the last, to a later place, or the first to an earlier one. Shares stay.
    """
    pieces = [_by_layer(own) for own in packing.pieces]
    places = case.graph.places
    timed = _timed(case, pieces)
    bound = bound_of(case, packing)
    size = len(case.graph.graph) + sum(len(own) for own in pieces)  # events and fills that one evaluation visits
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
    """The packing with these pieces, by worker, in place of its own, and the times that follow."""
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
    """The pieces cut so that each has one layer."""
    # Pieces of several layers could not be moved in part.
    return tuple((at, layer, layer + 1, a, b) for at, first, stop, a, b in pieces for layer in range(first, stop))


def _seconds(case: Case, worker: int, piece: Piece) -> Seconds:
    _, layer, stop, first, last = piece
    running = case.frozen.running(last - first)
    return (case.options.overhead + running[stop] - running[layer]) / case.options.speed(worker)


def _timed(case: Case, pieces: Sequence[Pieces]) -> _Timed:
    graph = case.graph
    work: dict[Place, Seconds] = {}
    for worker, own in enumerate(pieces):
        for piece in own:
            place = worker, piece[0]
            work[place] = work.get(place, 0.0) + _seconds(case, worker, piece)
    times = graph.filled(work)
    path = times.critical_path()
    return _Timed(
        makespan=times.ends[path[0]],  # the path goes from the last event back
        critical=tuple(graph.place_of[event] for event in path if graph.place_of.get(event, NO_PLACE) in work),
        ends=tuple(times.ends[tail] for tail in graph.graph.tails),
        is_shifted=graph.is_shifted(times),
    )


def _moves(
    pieces: Sequence[Pieces], places: Sequence[Sequence[int]], critical: Sequence[Place]
) -> Iterator[tuple[int, Pieces]]:
    """(worker, its pieces after a move) of each move of pieces on the critical path; moves of few pieces come first.

    `pieces`: the pieces of each worker. `places`: the positions of rooms in each worker's order. `critical`: the places
    with fills on the critical path.
    """
    for worker, position in critical:
        own = pieces[worker]
        here = [i for i, piece in enumerate(own) if piece[0] == position]
        index = places[worker].index(position)
        first, stop = here[0], here[-1] + 1
        for later in places[worker][index + 1 : index + 1 + REACH]:
            # From the last piece back: the fewest pieces that move are tried first.
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
    """(first part, second part) of a piece: its last sample alone (`count` -1), or its first sample alone (1).

    None if the piece has one sample.
    """
    at, layer, stop, first, last = piece
    if last - first < 2:
        return None
    cut = last - 1 if count < 0 else first + 1
    return (at, layer, stop, first, cut), (at, layer, stop, cut, last)


def _merged(pieces: Pieces) -> Pieces:
    """The pieces after neighbours of one layer, one place and consecutive samples were joined."""
    found: list[Piece] = []
    for piece in pieces:
        at, layer, stop, first, last = piece
        if found and found[-1][:3] == (at, layer, stop) and found[-1][4] == first:
            found[-1] = (at, layer, stop, found[-1][3], last)
        else:
            found.append(piece)
    return tuple(found)

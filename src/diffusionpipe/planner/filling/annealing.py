"""A longer local search for fills that other ways leave far from the bound: it moves the layers of single samples.

        worker 0   F F F F v B F v B F v B B B vv       v moves along its worker's order, or to another worker; samples
        worker 1   F F F B v F B v F B F B B vvv        of one worker may overtake each other, layers of a sample not

Where a sample's layer is longer than most waits, it delays compute in every place, and the delays that others absorb
decide. Several workers then end late together, so no single move shortens the iteration. Therefore the search judges
all late ends at once,

    badness = (sum over workers and the iteration of max(0, end - bound) ** 4) ** (1/4),

and accepts a little worse moves at first (simulated annealing: Kirkpatrick, Gelatt, Vecchi, Science 220, 1983). Moves
are drawn from a generator with a fixed seed, so equal cases have equal results.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from math import log
from random import Random

from diffusionpipe.planner.filling.fill_queue import Piece
from diffusionpipe.planner.filling.polish import Pieces, retimed
from diffusionpipe.planner.filling.shares import CLOSE, Case, Packing, bound_of
from diffusionpipe.timing import Times, ends_of
from diffusionpipe.units import Seconds

HOT, COLD = 0.1, 0.005
"""The growth of badness that is accepted at first and at the end, in times of a sample through all layers."""
AIMED = 0.7
"""The part of the moves that take a layer off the critical path; the others take any layer."""
MOVED_AWAY = 0.1
"""The part of the moves that give a sample to another worker."""
FAR_SHIFTS = 0.25
"""The part of the moves along a worker's order that go up to eight places; the others go one place."""
POWER = 4
SPLIT_LOSS = 1.01
"""Pieces are separated into single samples if these take at most this factor longer; else they move as a whole."""


class _Unit:
    """Samples of one worker that stay together, with the place in the worker's order at which each layer runs."""

    __slots__ = ("places", "seconds", "size", "worker")

    def __init__(self, worker: int, size: int, places: list[int], seconds: list[Seconds]) -> None:
        self.worker = worker
        self.size = size
        self.places = places
        """The index of each layer's place among the worker's places, by layer; later layers have no earlier place."""
        self.seconds = seconds
        """The time of each layer on a device of speed 1, by layer, in seconds."""


class _State:
    """The state of the search: all units at their places, and the times of all events with this frozen work."""

    def __init__(self, case: Case, units: list[_Unit], bound: Seconds) -> None:
        self.units, self.bound = units, bound
        self._graph = graph = case.graph
        self._speeds = [case.options.speed(worker) for worker in range(graph.num_workers)]
        self.places = graph.places
        # Slots are numbered worker by worker; a worker's first slot is at its offset.
        self._offsets = list(accumulate(map(len, self.places), initial=0))
        self._events = list(graph.rooms.values())
        """The event of each slot's room, by slot; a slot is a place of one worker."""
        self._slot_of = {event: slot for slot, event in enumerate(self._events)}
        self.holders: list[list[tuple[_Unit, int]]] = [[] for _ in self._events]
        """The units and layers that run in each slot, by slot."""
        self._durations = list(graph.durations)
        self._ends: list[Seconds] = [0]
        self.makespan = 0.0
        for unit in units:
            self._put(unit, range(len(unit.places)), 1)
        self.badness = self._times(1)

    def slot(self, unit: _Unit, layer: int) -> int:
        """The number of the slot, a place of one worker, in which a layer of the unit runs."""
        return self._offsets[unit.worker] + unit.places[layer]

    def _put(self, unit: _Unit, layers: Sequence[int], sign: int) -> None:
        for layer in layers:
            slot = self.slot(unit, layer)
            self._durations[self._events[slot]] += sign * unit.seconds[layer] / self._speeds[unit.worker]
            if sign > 0:
                self.holders[slot].append((unit, layer))
            else:
                self.holders[slot].remove((unit, layer))
                if not self.holders[slot]:
                    self._durations[self._events[slot]] = 0.0  # without the rounding errors of all sums before

    def move(self, unit: _Unit, worker: int, places: list[int], allowed: Seconds) -> int:
        """Move a unit to a worker and places if badness then is at most `allowed`; return the number of events timed.

        The number is negative if the unit stays where it is.
        """
        layers = [
            i for i, (a, b) in enumerate(zip(unit.places, places, strict=True)) if a != b or worker != unit.worker
        ]
        before = unit.worker, unit.places, self.makespan
        touched = [self.slot(unit, layer) for layer in layers]
        self._put(unit, layers, -1)
        unit.worker, unit.places = worker, places
        self._put(unit, layers, 1)
        # Events before the first room that changes keep their ends.
        first = min(self._events[slot] for slot in (*touched, *(self.slot(unit, layer) for layer in layers)))
        kept = self._ends
        badness, visited = self._times(first), len(kept) - first
        if badness <= allowed:
            self.badness = badness
            return visited
        self._put(unit, layers, -1)
        unit.worker, unit.places, self.makespan = before
        self._put(unit, layers, 1)
        self._ends = kept
        return -visited

    def _times(self, first: int) -> Seconds:
        """Time all events from number `first` on, and return the badness of the state in seconds."""
        graph = self._graph
        self._ends = ends = ends_of(
            graph.graph, self._durations, waking=graph.waking, issues=graph.issues, before=self._ends[:first]
        )
        self.makespan = max(ends)
        tails = [ends[tail] for tail in graph.graph.tails]
        late = [end - self.bound for end in (*tails, self.makespan) if end > self.bound]
        return float(sum(excess**POWER for excess in late) ** (1 / POWER))

    def critical(self) -> list[int]:
        """The numbers of the slots with frozen work on the critical path."""
        path = Times(graph=self._graph.graph, ends=self._ends, issues=self._graph.issues).critical_path()
        return [slot for event in path if (slot := self._slot_of.get(event)) is not None and self.holders[slot]]

    def pieces(self, chunk: int) -> tuple[Pieces, ...]:
        """The pieces of each worker, of at most `chunk` samples, in an order in which they can run, by worker.

        Samples are numbered from 0 within each worker.
        """
        found: list[Pieces] = []
        for worker, places in enumerate(self.places):
            first, own = 0, list[Piece]()
            for unit in sorted((u for u in self.units if u.worker == worker), key=lambda u: u.places):
                stop = first + unit.size
                own += [(places[at], layer, layer + 1, first, stop) for layer, at in enumerate(unit.places)]
                first = stop
            found.append(_joined(sorted(own), chunk))
        return tuple(found)


def _joined(pieces: Sequence[Piece], chunk: int) -> Pieces:
    """The pieces after neighbours of one layer and one place were joined to pieces of at most `chunk` samples."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1][:3] == piece[:3] and found[-1][4] == piece[3] and piece[4] - found[-1][3] <= chunk:
            found[-1] = (*found[-1][:4], piece[4])
        else:
            found.append(piece)
    return tuple(found)


def annealed(case: Case, packing: Packing, *, visits: int, enough: Seconds) -> Packing:
    """The best packing found by moving single samples, until `visits` events were timed or it takes `enough` seconds.

    At most as many samples as all open chunks of the largest size hold are unfinished on a worker at a time.
    """
    units = _units(case, packing)
    state, random, best = _State(case, units, bound_of(case, packing)), Random(0), packing
    sample, left = case.seconds_a_sample(1), visits
    enough = max(enough, state.bound * CLOSE)
    critical = state.critical()
    while left > 0 and best.makespan > enough:
        unit, layer = _chosen(state, critical, random)
        target = _elsewhere(state, unit, layer, case.hosts, random)
        left -= 10  # what choosing takes
        if target is None:
            continue
        # From HOT to COLD in equal ratios as the budget is used up.
        heat = sample * HOT * (COLD / HOT) ** (1 - left / visits)
        # Worse by d is accepted with the probability exp(- d / heat).
        visited = state.move(unit, *target, state.badness - heat * log(1.0 - random.random()))
        left -= abs(visited)
        if visited > 0:
            critical = state.critical()
            if state.makespan < best.makespan * (1 - 1e-9):
                best = _better(case, best, state)
                left -= sum(map(len, best.pieces)) + len(case.graph.graph)  # the cost of timing the better packing
    return best


def _units(case: Case, packing: Packing) -> list[_Unit]:
    """The units of a packing: its single samples, or neighbours with equal places if these must stay together."""
    units = []
    single = case.seconds_a_sample(1) <= case.seconds_a_sample(packing.chunk) * SPLIT_LOSS
    for worker, pieces in enumerate(packing.pieces):
        index = {position: i for i, position in enumerate(case.graph.places[worker])}
        chains: list[list[int]] = [[0] * case.frozen.num_layers for _ in range(packing.shares[worker])]
        for position, first, stop, start, end in pieces:
            for sample in range(start, end):
                chains[sample][first:stop] = [index[position]] * (stop - first)
        most = 1 if single else packing.chunk
        # Neighbours with equal places are one unit, where samples are not separated.
        for chain, same in groupby(chains):
            count = len(list(same))
            for first in range(0, count, most):
                size = min(most, count - first)
                seconds = [case.options.overhead + b - a for a, b in pairwise(case.frozen.running(size))]
                units.append(_Unit(worker, size, list(chain), seconds))
    return units


def _chosen(state: _State, critical: Sequence[int], random: Random) -> tuple[_Unit, int]:
    """(a unit, the number of one of its layers), drawn at random, mostly from the critical path."""
    if critical and random.random() < AIMED:
        return random.choice(state.holders[random.choice(critical)])
    unit = random.choice(state.units)
    return unit, random.randrange(len(unit.places))


def _elsewhere(
    state: _State, unit: _Unit, layer: int, hosts: Sequence[int], random: Random
) -> tuple[int, list[int]] | None:
    """(worker, place of each layer) to which a unit may move, drawn at random; None if it would stay where it is.

    The layer moves some places along the worker's order, or the whole unit moves to another host.
    """
    if random.random() < MOVED_AWAY:
        worker = random.choice(hosts)
        last, place, spread = (
            len(state.places[worker]) - 1,
            random.randrange(len(state.places[worker])),
            random.choice((0, 2)),  # all layers at one place, or each up to two places after the one before
        )
        places = []
        for _ in unit.places:
            places.append(place)
            place = min(last, place + random.randint(0, spread))
        return (worker, places) if worker != unit.worker else None
    distance = 1 + (random.randrange(8) if random.random() < FAR_SHIFTS else 0)
    place = unit.places[layer] + random.choice((-distance, distance))
    place = max(0, min(len(state.places[unit.worker]) - 1, place))
    # Layers of a sample stay in order: those before it move along to an earlier place, those after it to a later one.
    before = [min(at, place) for at in unit.places[:layer]]
    places = [*before, place, *(max(at, place) for at in unit.places[layer + 1 :])]
    return (unit.worker, places) if places != unit.places else None


def _better(case: Case, best: Packing, state: _State) -> Packing:
    """The state as a packing if it is faster than `best` and keeps to the limit of unfinished samples, else `best`."""
    pieces = state.pieces(best.chunk)
    allowed = case.options.open_chunks * case.options.allowed_chunks(case.batch)[0]
    if max(_most_unfinished(own, case.frozen.num_layers) for own in pieces) > allowed:
        return best
    found = retimed(case, best, pieces)
    return found if found.makespan < best.makespan else best


def _most_unfinished(pieces: Pieces, num_layers: int) -> int:
    """The most samples at a time that have run the first layer but not all of them."""
    unfinished = most = 0
    for _, first, stop, start, end in pieces:
        unfinished += (end - start) * (first == 0)
        most = max(most, unfinished)
        unfinished -= (end - start) * (stop == num_layers)
    return most

"""Orders made shorter: every action moves into the first gap where it may be, forwards and backwards in time.

    given           0 | F0 .  .  I0 W0 F1 .  .  I1 W1
                    1 | .  F0 I0 W0 .  .  F1 I1 W1 .
    pulled left     0 | F0 F1 .  I0 W0 .  I1 W1              in the order of the starts, each into the first gap that is
                    1 | .  F0 I0 W0 F1 I1 W1 .               long enough, after its inputs, where memory has room
    pulled right    0 | F0 .  F1 I0 W0 I1 W1                 the same with time reversed, from the last action back
                    1 | .  F0 I0 F1 I1 W0 W1

In this way Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362,
squeeze repeated building blocks, to the left and with equal costs. To pull left and right in turn is the
forward-backward improvement of project scheduling (Li and Willis, "An iterative scheduling technique for
resource-constrained project scheduling", European Journal of Operational Research 56, 1992). It takes any costs, and
nothing gets longer by it: an action's old place is always free. Memory has the same form in both directions (held from
the start of F to the end of W; with time reversed from the start of W to the end of F), so one function does both.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TypeAlias

from diffusionpipe.ir import Action
from diffusionpipe.schedules.building.split_work import Goal, Network, SplitWork, network_of, peaks
from diffusionpipe.units import Bytes

_MOST_ROUNDS = 8

_Times: TypeAlias = tuple[int, int]
"""(makespan, window) of orders in ticks; window: the longest time between a worker's first start and its last end."""


def best_squeezed(
    work: SplitWork,
    candidates: Iterable[Sequence[Sequence[Action]]],
    *,
    objective: Goal = Goal.MAKESPAN,
) -> list[list[Action]]:
    """The shortest orders that squeezing makes of the candidates, by worker.

    Orders are compared by the objective, equal ones by the other goal.
    A candidate that needs more memory than there is is left out; at least one must fit. The first of equals wins. The
    search ends early where nothing can be shorter. Cost: about 15 microseconds for each action and candidate.
    """
    network = network_of(work)
    bounds = _ranked(_bounds(network), objective)
    best: tuple[_Times, list[int]] | None = None
    for orders in candidates:
        if any(peak > limit for peak, limit in zip(peaks(work.costs, orders), work.limits, strict=True)):
            continue
        for times, starts in squeezed(network, [[network.number(action) for action in order] for order in orders]):
            rank = _ranked(times, objective)
            if best is None or rank < best[0]:
                best = rank, starts
            # Nothing can be shorter in either time.
            if best[0] == bounds:
                return network.orders(best[1])
    assert best is not None, "no candidate fits into memory"
    return network.orders(best[1])


def squeezed(network: Network, orders: Sequence[Sequence[int]]) -> Iterator[tuple[_Times, list[int]]]:
    """((makespan, window), start of each action) of the orders, then of the orders after each pull to left or right.

    It ends when pulling no longer helps, after 8 rounds at most.

    In their times everything starts as early as it can, as it does after a pull to the left.
    """
    mirrored = network.mirrored()
    starts = network.starts(orders)
    best = _times(network, starts)
    yield best, starts
    for _ in range(_MOST_ROUNDS):
        before = best
        starts = _pulled(network, starts)
        left = _times(network, starts)
        yield left, starts
        starts = _reversed(network, _pulled(mirrored, _reversed(network, starts)))
        right = _times(network, network.starts(network.sequences(starts)))
        yield right, starts
        best = min(best, left, right)
        if best == before:
            return


def _ranked(times: _Times, objective: Goal) -> _Times:
    """The two times in the order in which they are compared: the objective's first."""
    return times[::-1] if objective == Goal.WINDOW else times


def _times(network: Network, starts: Sequence[int]) -> _Times:
    m = network.num_microbatches
    first, last = [max(starts)] * len(network.limits), [0] * len(network.limits)
    for letter, worker in enumerate(network.workers):
        own = starts[letter * m : letter * m + m]
        first[worker] = min(first[worker], min(own))
        last[worker] = max(last[worker], max(own) + network.durations[letter])
    return max(last), max(end - start for end, start in zip(last, first, strict=True))


def _bounds(network: Network) -> _Times:
    """(makespan, window) that no orders beat.

    The makespan follows from a micro-batch's way and from each worker's work after its earliest start, the window from
    the work alone.
    """
    m = network.num_microbatches
    earliest = [0] * len(network.durations)
    forwards = range(0, len(earliest), 3)
    # F down the stages, I up, then W: all that an action waits for is known before it.
    for letter in (*forwards, *(letter + 1 for letter in reversed(forwards)), *(letter + 2 for letter in forwards)):
        for offset, least in network.waits[letter]:
            earliest[letter] = max(earliest[letter], earliest[letter + offset // m] + least)
    way = max(start + duration for start, duration in zip(earliest, network.durations, strict=True))
    first, work = [way] * len(network.limits), [0] * len(network.limits)
    for worker, start, duration in zip(network.workers, earliest, network.durations, strict=True):
        first[worker] = min(first[worker], start)
        work[worker] += m * duration
    return max(way, *(start + total for start, total in zip(first, work, strict=True))), max(work)


def _reversed(network: Network, starts: Sequence[int]) -> list[int]:
    """The start of each action with time reversed, by number: the ticks from its end to the last end."""
    durations = [duration for duration in network.durations for _ in range(network.num_microbatches)]
    ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
    makespan = max(ends)
    return [makespan - end for end in ends]


def _shortest(network: Network) -> list[int]:
    """The shortest duration of each worker's actions, by worker, in ticks."""
    found = [max(network.durations)] * len(network.limits)
    for worker, duration in zip(network.workers, network.durations, strict=True):
        found[worker] = min(found[worker], duration)
    return found


def _pulled(network: Network, starts: Sequence[int]) -> list[int]:
    """The start of each action, by number, after a pull to the left.

    Each action, in the order of the old starts, moves to the first gap where it may be.
    """
    m, workers, durations, waits = network.num_microbatches, network.workers, network.durations, network.waits
    acquires, releases = network.acquires, network.releases
    rows = [_Row(limit, shortest) for limit, shortest in zip(network.limits, _shortest(network), strict=True)]
    pulled = [0] * len(starts)
    for number in sorted(range(len(starts)), key=starts.__getitem__):
        letter = number // m
        start = 0
        for offset, least in waits[letter]:
            ready = pulled[number + offset] + least
            if ready > start:
                start = ready
        row = rows[workers[letter]]
        pulled[number] = row.place(start, durations[letter], acquires[letter], releases[letter])
    return pulled


class _Row:
    """The times at which one worker is free, and the memory that it holds for the actions that are placed.

    Actions that are not placed yet come later in the old orders: an action holds nothing before its old start.
    """

    def __init__(self, limit: Bytes, shortest: int) -> None:
        self.limit = limit
        self.shortest = shortest
        """The shortest of the worker's durations; a shorter time is not a gap."""
        self.gap_starts: list[int] = [0]
        self.gap_ends: list[float] = [inf]
        """The times between actions, in order; the last one has no end."""
        self.changes: list[tuple[int, Bytes]] = []
        """(time, bytes that are taken then, negative if they are given back), in order of time."""
        self.held: Bytes = 0
        """Bytes that the worker holds after the last change."""

    def place(self, start: int, duration: int, acquired: Bytes, released: Bytes) -> int:
        """Place an action in the first gap from `start` on that is long enough and has memory for it.

        Returns the action's start. `acquired`: the bytes that it takes at its start. `released`: the bytes that it
        gives back at its end.
        """
        if acquired:
            start = self._first_room(start, self.limit - acquired)
        starts, ends = self.gap_starts, self.gap_ends
        gap = bisect_right(ends, start)  # the first gap that ends after `start`
        opens = starts[gap]
        end = (start if start > opens else opens) + duration
        while end > ends[gap]:
            gap += 1
            opens = starts[gap]
            end = opens + duration
        start, closes, shortest = end - duration, ends[gap], self.shortest
        # The parts of the gap on either side stay gaps if any action of the worker fits into them.
        if closes - end >= shortest:
            starts[gap] = end
            if start - opens >= shortest:
                starts.insert(gap, opens)
                ends.insert(gap, start)
        elif start - opens >= shortest:
            ends[gap] = start
        else:
            del starts[gap], ends[gap]
        if acquired:
            insort(self.changes, (start, acquired))
        if released:
            insort(self.changes, (end, -released))
        self.held += acquired - released
        return start

    def _first_room(self, start: int, most: Bytes) -> int:
        """The earliest time from `start` on after which the worker never holds more than `most` bytes."""
        held = self.held
        for time, change in reversed(self.changes):
            if time <= start:
                break
            held -= change
            # Too much was held before this change, so the room begins with it.
            if held > most:
                return time
        return start

"""When everything ends if every rank works through its sequence as early as it can."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.ordering.problem import NO_LETTER, Problem
from diffusionpipe.schedules.shapes import SPLIT
from diffusionpipe.timing import held
from diffusionpipe.timing.held import peak_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a set of sequences reaches."""

    makespan: int
    window: int
    peaks: tuple[int, ...]
    """The most that each rank holds."""


def figures_of(problem: Problem, orders: Sequence[Sequence[int]]) -> Figures | None:
    """What the sequences reach, or None if the ranks wait for each other in a circle."""
    ends = ends_of(problem, orders)
    if ends is None:
        return None
    last = [max(ends[letter][-1] for letter in set(order)) for order in orders]
    first = [ends[order[0]][0] - problem.durations[order[0]] for order in orders]
    return Figures(
        makespan=max(last),
        window=max(end - start for end, start in zip(last, first, strict=True)),
        peaks=peaks_of(problem, orders),
    )


def peaks_of(problem: Problem, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The most that each rank holds: a letter's memory is taken at its start and given back at its end."""
    both = [(change, 0) if change > 0 else (0, change) for change in changes_of(problem)]
    return tuple(peak_of(map(both.__getitem__, order)) for order in orders)


def changes_of(problem: Problem) -> list[int]:
    """By letter what it takes at its start, or less than 0: gives back at its end."""
    changes = []
    for activation, kept in zip(problem.activation, problem.kept, strict=True):
        changes += [sum(change) for change in held.changes_of(SPLIT, activation, kept).values()]
    return changes


def fits(problem: Problem, orders: Sequence[Sequence[int]]) -> bool:
    """Whether every rank stays within its memory."""
    return all(peak <= limit for peak, limit in zip(peaks_of(problem, orders), problem.limits, strict=True))


def ends_of(problem: Problem, orders: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """By letter the ends of its micro-batches, or None if the ranks wait for each other in a circle.

    Cost: linear in the actions.
    """
    durations, waits_for, lags = problem.durations, problem.waits_for, problem.lags
    ends: list[list[int]] = [[] for _ in durations]
    sleeper = [NO_LETTER] * len(durations)  # by letter: the rank that waits for it
    clocks = [0] * problem.num_ranks
    places = [0] * problem.num_ranks
    awake = list(range(problem.num_ranks))
    while awake:
        rank = awake.pop()
        order, clock = orders[rank], clocks[rank]
        place, stop = places[rank], len(order)
        while place < stop:
            letter = order[place]
            done = ends[letter]
            before = waits_for[letter]
            if before >= 0:
                other = ends[before]
                if len(other) <= len(done):
                    sleeper[before] = rank
                    break
                arrival = other[len(done)] + lags[letter]
                if arrival > clock:
                    clock = arrival
            clock += durations[letter]
            done.append(clock)
            waiting = sleeper[letter]
            if waiting >= 0:
                awake.append(waiting)
                sleeper[letter] = NO_LETTER
            place += 1
        clocks[rank], places[rank] = clock, place
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        return None
    return ends

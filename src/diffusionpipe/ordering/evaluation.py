"""When everything ends if every rank works through its sequence as early as it can."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.ordering.problem import Problem
from diffusionpipe.schedules.building.shapes import SPLIT
from diffusionpipe.timing import held
from diffusionpipe.timing.held import peak_of
from diffusionpipe.timing.march import march


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The makespan, the window and the peak memory of the ranks' sequences of letters, in the problem's units."""

    makespan: int
    window: int
    peaks: tuple[int, ...]
    """The most activation memory that each rank holds, in the problem's unit of memory."""


def figures_of(problem: Problem, orders: Sequence[Sequence[int]]) -> Figures | None:
    """The figures that the ranks' sequences of letters reach; None if the ranks wait for each other in a circle."""
    ends = ends_of(problem, orders)
    if ends is None:
        return None
    # Each letter's last end: a rank's last action may be any of its ops.
    last = [max(ends[letter][-1] for letter in set(order)) for order in orders]
    first = [ends[order[0]][0] - problem.durations[order[0]] for order in orders]
    return Figures(
        makespan=max(last),
        window=max(end - start for end, start in zip(last, first, strict=True)),
        peaks=peaks_of(problem, orders),
    )


def peaks_of(problem: Problem, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The most memory that each rank holds, by rank, in the problem's unit.

    A letter's memory is taken at its start and given back at its end.
    """
    both = [(change, 0) if change > 0 else (0, change) for change in changes_of(problem)]
    return tuple(peak_of(map(both.__getitem__, order)) for order in orders)


def changes_of(problem: Problem) -> list[int]:
    """The memory that each letter takes at its start (above 0) or gives back at its end (below 0), by letter."""
    changes = []
    for activation, kept in zip(problem.activation, problem.kept, strict=True):
        changes += [sum(change) for change in held.changes_of(SPLIT, activation, kept).values()]
    return changes


def fits(problem: Problem, orders: Sequence[Sequence[int]]) -> bool:
    """Whether every rank stays within its memory with these sequences."""
    return all(peak <= limit for peak, limit in zip(peaks_of(problem, orders), problem.limits, strict=True))


def ends_of(problem: Problem, orders: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The end of each micro-batch of each letter, by letter, in ticks; None if the ranks wait in a circle."""
    return march(orders, problem.durations, problem.waits_for, problem.lags)

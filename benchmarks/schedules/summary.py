"""The figures over all cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.schedules.simulated import EPSILON, LIMITS, Found, Violation
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """All cells at one memory limit."""

    limit: str
    cells: int
    too_small: int
    """Cells in which not even one micro-batch fits."""
    wins: tuple[tuple[str, int], ...]
    """Family -> cells in which no other of one copy that fits is faster; the most wins first."""
    optimal: int
    """Cells in which the search reaches its lower bound."""
    over_bound: float
    """The search's objective over the bound, less 1: median,"""
    over_bound_most: float
    """and maximum."""
    best_over_search: float
    """The best family's objective over the search's, less 1: median,"""
    best_over_search_most: float
    """and maximum."""
    violations: int
    """Cells in which a family that fits is better than the search."""
    seconds: Seconds
    """Of the search: median,"""
    seconds_most: Seconds
    """and maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfFamily:
    """One family in all cells that it can do."""

    name: str
    cells: int
    weights: float
    peak: tuple[float, float]
    """Over 1F1B's: least and most."""
    bubble: float
    """Median, as the others."""
    window_bubble: float
    over_bound: float | None
    """Objective over the bound at the smallest limit of LIMITS into which it fits, less 1; None if it never does or has
    two copies, which the bound does not know."""
    seconds_most: Seconds
    """To generate it."""


def violations(cells: Sequence[Found]) -> list[Violation]:
    """Of all cells."""
    return [violation for found in cells for violation in found.violations()]


def of_limits(cells: Sequence[Found]) -> list[Limit]:
    """One summary for each limit."""
    return [_of_limit(cells, limit) for limit in LIMITS]


def _of_limit(cells: Sequence[Found], limit: str) -> Limit:
    possible = [found for found in cells if limit in found.searched]
    wins: dict[str, int] = {}
    over_bound, over_search, seconds = [], [], []
    for found in possible:
        best, answer = found.best(limit), found.searched[limit]
        value = answer.value(found.objective)
        over_bound.append(value / answer.bound - 1)
        seconds.append(answer.seconds)
        if best:
            over_search.append(best[0].value(found.objective) / value - 1)
        for family in best:
            wins[family.name] = wins.get(family.name, 0) + 1
    return Limit(
        limit=limit,
        cells=len(possible),
        too_small=len(cells) - len(possible),
        wins=tuple(sorted(wins.items(), key=lambda pair: (-pair[1], pair[0]))),
        optimal=sum(found.searched[limit].is_optimal for found in possible),
        over_bound=median(over_bound) if over_bound else 0.0,
        over_bound_most=max(over_bound, default=0.0),
        best_over_search=median(over_search) if over_search else 0.0,
        best_over_search_most=max(over_search, default=0.0),
        violations=sum(any(v.limit == limit for v in found.violations()) for found in possible),
        seconds=median(seconds) if seconds else 0.0,
        seconds_most=max(seconds, default=0.0),
    )


def over_bound(found: Found, name: str) -> float | None:
    """How far a family is above the bound of the smallest limit into which it fits; None without one."""
    for limit, answer in found.searched.items():
        for family in found.fitting(limit):
            if family.name == name:
                excess = family.value(found.objective) / answer.bound - 1
                return 0.0 if abs(excess) < EPSILON else excess
    return None


def of_families(cells: Sequence[Found]) -> list[OfFamily]:
    """One summary for each family, the smallest bubble first."""
    names = dict.fromkeys(family.name for found in cells for family in found.families)
    made = []
    for name in names:
        mine = [(found, family) for found in cells for family in found.families if family.name == name]
        peaks = [2 * family.peak / found.cell.one_f_one_b_peak for found, family in mine]
        excess = [value for found, _ in mine if (value := over_bound(found, name)) is not None]
        made.append(
            OfFamily(
                name=name,
                cells=len(mine),
                weights=max(family.weights for _, family in mine),
                peak=(min(peaks), max(peaks)),
                bubble=median(family.bubble for _, family in mine),
                window_bubble=median(family.window_bubble for _, family in mine),
                over_bound=median(excess) if excess else None,
                seconds_most=max(family.seconds for _, family in mine),
            )
        )
    return sorted(made, key=lambda family: (family.bubble, family.name))

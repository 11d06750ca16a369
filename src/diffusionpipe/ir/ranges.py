"""Sets of samples or layers as lists of ranges."""

from collections.abc import Sequence
from itertools import pairwise

from diffusionpipe.ir.placement import Range


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The union of the ranges as ranges that neither overlap nor touch, in ascending order; empty ones are left out.

    >>> print(*merged([Range(4, 6), Range(0, 2), Range(1, 4), Range(8, 9)]))
    0:6 8:9
    """
    runs: list[Range] = []
    for part in sorted((r for r in ranges if r), key=lambda r: r.start):
        if runs and part.start <= runs[-1].stop:  # ranges that touch are joined too
            runs[-1] = Range(runs[-1].start, max(runs[-1].stop, part.stop))
        else:
            runs.append(part)
    return runs


def is_disjoint(ranges: Sequence[Range]) -> bool:
    """Whether no two of the ranges have a number in common."""
    parts = sorted((r for r in ranges if r), key=lambda r: r.start)
    return all(one.stop <= other.start for one, other in pairwise(parts))


def tiles(ranges: Sequence[Range], whole: Range) -> bool:
    """Whether the ranges, in any order, cover `whole` and nothing else, each number once."""
    return is_disjoint(ranges) and merged(ranges) == merged([whole])


def is_within(inner: Sequence[Range], outer: Sequence[Range]) -> bool:
    """Whether every number of the inner ranges is in one of the outer ranges."""
    runs = merged(outer)
    return all(any(run.intersection(part) == part for run in runs) for part in merged(inner))

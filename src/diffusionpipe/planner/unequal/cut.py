"""DynaPipe's cut of a step's samples into micro-batches of unequal numbers of tokens.

Jiang et al., "DynaPipe: Optimizing Multi-task Training through Dynamic Pipelines", EuroSys 2024, section 4,
https://arxiv.org/abs/2311.10418. The samples of a step lie in a row, longest first. For each bound on the time of a
micro-batch a dynamic program finds the cut with the least sum of times:

    f(n) = min over i of f(i) + t(i, n)         t(i, n) <= bound,  samples i, ..., n - 1 fit in memory

and the bound is best where  (stages - 1) x longest micro-batch + sum  is least: the time of a pipeline whose
micro-batches follow each other without a gap.

    1024  1024 | 768  768  768 | 512  512  512  512  512

It differs from the paper in one point: samples of a micro-batch have one size, so nothing is filled up. The paper fills
shorter sequences up to the longest of a micro-batch.
"""

from collections.abc import Callable, Sequence
from math import inf

from diffusionpipe.ir.cells import Cell
from diffusionpipe.units import Seconds

Price = Callable[[int, int], Seconds]
"""(number of a size, samples) -> seconds of a micro-batch's forward and backward on the slowest stage."""
Room = Callable[[int], int]
"""Number of a size -> the most samples of this size that fit in memory as one micro-batch."""


def best_cut(sizes: Sequence[int], price: Price, room: Room, num_stages: int) -> tuple[Cell, ...]:
    """The micro-batches into which samples of these sizes are cut, so that a pipeline's time is least.

    `sizes` has the size number of each sample; equal ones lie side by side.

    With three stages a longer micro-batch costs more than the call that it saves, so that the cut is even:

    >>> best_cut((0, 0, 0, 0), lambda size, samples: 1 + 4 * samples, lambda size: 3, 3)
    (Cell(size=0, samples=1), Cell(size=0, samples=1), Cell(size=0, samples=1), Cell(size=0, samples=1))
    >>> best_cut((0, 0, 0, 0), lambda size, samples: 9 + 4 * samples, lambda size: 3, 3)
    (Cell(size=0, samples=2), Cell(size=0, samples=2))

    Raises:
        ValueError: a sample does not fit in memory alone.
    """
    lacking = [size for size in sizes if room(size) < 1]
    if lacking:
        raise ValueError(f"not one sample of size {lacking[0]} fits in memory")
    times: dict[Cell, Seconds] = {}
    for size in set(sizes):
        most = min(room(size), sizes.count(size))
        times |= {Cell(size, samples): price(size, samples) for samples in range(1, most + 1)}
    least, _ = _least_sum(sizes, times, inf)
    best: tuple[Seconds, tuple[Cell, ...]] = (inf, ())
    for bound in sorted(set(times.values())):
        if (num_stages - 1) * bound + least >= best[0]:
            break  # a longer micro-batch cannot pay any more
        total, cells = _least_sum(sizes, times, bound)
        if cells:
            # The longest micro-batch may be shorter than the bound.
            best = min(best, ((num_stages - 1) * max(times[cell] for cell in cells) + total, cells), key=_value)
    return best[1]


def _value(found: tuple[Seconds, tuple[Cell, ...]]) -> Seconds:
    return found[0]


def _least_sum(sizes: Sequence[int], times: dict[Cell, Seconds], bound: Seconds) -> tuple[Seconds, tuple[Cell, ...]]:
    """(least sum of the times of micro-batches none of which is above `bound`, these micro-batches in order).

    (inf, ()) if every cut has a micro-batch above the bound. `sizes`: the size number of each sample. `times`: the time
    of each micro-batch that fits in memory.
    """
    sums: list[Seconds] = [0.0]
    cells: list[Cell] = []
    for stop in range(1, len(sizes) + 1):
        size, found, last = sizes[stop - 1], inf, Cell(sizes[stop - 1], 0)
        for samples in range(1, stop + 1):
            cell = Cell(size, samples)
            if sizes[stop - samples] != size or cell not in times:  # another size, or more than fits in memory
                break
            if times[cell] <= bound and sums[stop - samples] + times[cell] < found:
                found, last = sums[stop - samples] + times[cell], cell
        sums.append(found)
        cells.append(last)
    if sums[-1] == inf:
        return inf, ()
    chosen, stop = [], len(sizes)
    while stop:
        chosen.append(cells[stop - 1])
        stop -= chosen[-1].samples
    return sums[-1], tuple(reversed(chosen))

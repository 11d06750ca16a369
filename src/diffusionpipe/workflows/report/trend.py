"""Whether numbers fall or rise, or whether chance alone would order them so."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import erfc, factorial, sqrt
from statistics import fmean

MOST_CHANCE = 0.003
"""A trend counts where equal numbers with noise show one as clear, up or down, in less than this part of cases."""
_EXACT = 30
"""Up to this number of values the chance is counted; of more a normal distribution gives it."""
_MOST = 500
"""More numbers are means of as many parts in a row."""


def trend(values: Sequence[float]) -> int:
    """-1 where numbers fall, 1 where they rise, 0 where neither can be told from chance.

    Mann and Kendall's test: of each two numbers the later one is lower or higher, and noise alone makes both equally
    frequent. It asks nothing of the noise but that it is the same all the time, so single high values do little.

    >>> trend([6, 5, 4, 3, 2, 1]), trend([1, 2, 3, 4, 5, 6]), trend([3, 1, 2, 3, 1, 2]), trend([5, 4, 3, 2, 1])
    (-1, 1, 0, 0)
    """
    numbers = _means(values)
    balance = _balance(numbers)
    if _chance(abs(balance), len(numbers)) >= MOST_CHANCE:
        return 0
    return 1 if balance > 0 else -1


def _means(values: Sequence[float]) -> Sequence[float]:
    """The numbers, or the means of `_MOST` parts of them."""
    count = len(values)
    if count <= _MOST:
        return values
    edges = [part * count // _MOST for part in range(_MOST + 1)]
    return [fmean(values[start:stop]) for start, stop in pairwise(edges)]


def _balance(numbers: Sequence[float]) -> int:
    """Pairs whose later number is higher, less those whose later number is lower."""
    before: list[float] = []
    balance = 0
    for number in numbers:
        balance += bisect_left(before, number) - (len(before) - bisect_right(before, number))
        insort(before, number)
    return balance


def _chance(balance: int, count: int) -> float:
    """The part of all orders of `count` different numbers that have this balance or more, up or down."""
    if count < 2 or balance <= 0:
        return 1.0
    if count > _EXACT:
        # The standard deviation of the balance under chance, by Kendall.
        spread = sqrt(count * (count - 1) * (2 * count + 5) / 18)
        # Less 1, because the balance moves in steps of 2.
        return erfc((balance - 1) / spread / sqrt(2))
    most = (count * (count - 1) // 2 - balance) // 2
    # orders[k]: orders of the first numbers with k pairs the wrong way round; each further one adds 0 to n - 1.
    orders = [1] + [0] * most
    for more in range(2, count + 1):
        sums = list(accumulate(orders))
        orders = [sums[k] - (sums[k - more] if k >= more else 0) for k in range(most + 1)]
    return min(1.0, 2 * sum(orders) / factorial(count))

"""Whether numbers fall or rise, or whether chance alone would order them so."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import erfc, factorial, sqrt
from statistics import fmean

MOST_CHANCE = 0.003
"""The chance below which a trend counts: the share of random orders of the values that show one as clear."""
_EXACT = 30
"""The most values for which the chance is counted exactly; for more, a normal distribution gives it."""
_MOST = 500
"""The most values that are compared; more are replaced by the means of this number of parts."""


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
    """The values; if they are more than `_MOST`, the means of `_MOST` parts of them, in order."""
    count = len(values)
    if count <= _MOST:
        return values
    edges = [part * count // _MOST for part in range(_MOST + 1)]
    return [fmean(values[start:stop]) for start, stop in pairwise(edges)]


def _balance(numbers: Sequence[float]) -> int:
    """The number of pairs whose later number is higher, less the number of pairs whose later number is lower."""
    before: list[float] = []
    balance = 0
    for number in numbers:
        balance += bisect_left(before, number) - (len(before) - bisect_right(before, number))
        insort(before, number)
    return balance


def _chance(balance: int, count: int) -> float:
    """The fraction of all orders of `count` different numbers whose `_balance` is this far from 0 or farther."""
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

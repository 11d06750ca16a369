"""A cost at any number of samples, from what was measured at some of them.

Measured costs come with noise, so that a size may seem cheaper than a smaller one. Real ones do not fall with samples.
First the measured costs are made to ascend: times by `ascending_means`, bytes by `ascending_peaks`. Then

                         .   beyond the largest size in proportion
    cost              o
     |             /         between two sizes on the line through both
     |  .....o---o           below the smallest flat
     |_____________________ samples

which is an upper bound outside of what was measured, as long as a sample costs no more in a larger batch than in a
smaller one. Where one size alone was measured, nothing says what of its cost is there for any batch: then all is in
proportion.

Nothing here subtracts one measured cost from another. Where one of them is larger the curve is nowhere lower, and it
scales with all of them, so an error of 2 % in a measured cost is one of at most 2 % everywhere. A slope has no such
limit: the slope of the last two makes of 10 ms for 4 samples and 10.2 or 10 ms for 8 samples 13 or 10 ms for 64.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from diffusionpipe.units import Bytes, Seconds


def ascending_means(values: Sequence[Seconds]) -> tuple[Seconds, ...]:
    """The ascending values that are nearest to these, in the sum of squares; where these fall, they become means.

    Pool adjacent violators: Ayer, Brunk, Ewing, Reid and Silverman, An Empirical Distribution Function for Sampling
    with Incomplete Information, Annals of Mathematical Statistics 26 (1955), https://doi.org/10.1214/aoms/1177728423.

    >>> ascending_means((1, 4, 2, 9, 10))
    (1, 3.0, 3.0, 9, 10)
    """
    pools: list[tuple[Seconds, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            # The mean of the values that fell, each counted once.
            mean, count = (before * others + mean * count) / (others + count), others + count
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


def ascending_peaks(values: Sequence[Bytes]) -> tuple[Bytes, ...]:
    """For each position, the largest value up to it.

    >>> ascending_peaks((1, 4, 2, 9))
    (1, 4, 4, 9)
    """
    return tuple(accumulate(values, max))


def cost_at(sizes: Sequence[int], ascending: Sequence[float], samples: float) -> float:
    """The cost of a number of samples, on a curve through `ascending` costs at these ascending `sizes`.

    Between two sizes it is linear, below the smallest flat, beyond the largest in proportion; 0 for no samples. With
    one size everything is in proportion.

    >>> [cost_at((2, 4), (10, 14), samples) for samples in (0, 1, 2, 3, 4, 6)]
    [0.0, 10, 10, 12.0, 14, 21.0]
    >>> [cost_at((2,), (10,), samples) for samples in (0, 1, 2, 3)]
    [0.0, 5.0, 10, 15.0]

    Raises:
        ValueError: the number of samples is negative.
    """
    if samples < 0:
        raise ValueError(f"a batch of {samples} samples has no cost")
    if samples == 0:
        return 0.0
    right = bisect_left(sizes, samples)
    if right < len(sizes) and sizes[right] == samples:
        return ascending[right]
    if right == len(sizes) or len(sizes) == 1:
        return ascending[-1] * samples / sizes[-1]
    if right == 0:
        return ascending[0]
    left = right - 1
    share = (samples - sizes[left]) / (sizes[right] - sizes[left])
    rounded = ascending[left] + share * (ascending[right] - ascending[left])
    return min(rounded, ascending[right])  # rounding must not lift it above the larger size's

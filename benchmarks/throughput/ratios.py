"""Ratios of interleaved measurements, with their uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of a ratio and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, num_resamples: int = 10_000, seed: int = 0
) -> Ratio:
    """The median over rounds of numerator / denominator, both measured in the same round.

    The interval is the percentile bootstrap over rounds (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13).
    """
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    draws = np.random.default_rng(seed).integers(len(ratios), size=(num_resamples, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))


def interleaved(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """The order of each round: every name once, each round starting one further on, so that no name keeps its place."""
    return [[names[(i + start) % len(names)] for i in range(len(names))] for start in range(num_rounds)]

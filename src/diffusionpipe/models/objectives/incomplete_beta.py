"""The inverse of the beta distribution's cumulative function, for tensors; torch has none, and scipy is not required.

The inverse is tabulated once. With logit(y) = log(y / (1 - y)), let z = logit of the quantile and w = logit of the
cumulative share. Both tails of z(w) are straight lines (of the slopes 1 / a and 1 / b) and all between is smooth, so
a cubic through values and slopes at even steps of w gives the quantile to 1e-9 for all 0.1 <= a, b <= 100 (the limits
that `models.objectives.objective_settings` sets); it grows with w, because the steps are small.
"""

from functools import lru_cache
from math import lgamma

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_REACH = 17.0
"""The table covers logits from -17 to 17. A float32 number in (0, 1) has its logit within 16.7."""
_STEPS = 4096
_FARTHEST = 1000.0  # logits of quantiles; exp(-745) is the smallest number above 0
_HALVINGS, _NEWTON_STEPS = 24, 4
_MAX_TERMS = 1000

Array = NDArray[np.float64]


def beta_quantile(share: Tensor, a: float, b: float) -> Tensor:
    """The x below which this share of a beta distribution lies, element by element, in the dtype of `share`.

    Shares below 1 / (1 + e^17) = 4e-8 count as that, and those above its complement too.
    """
    z_table, slope_table = (torch.from_numpy(table).to(share.device) for table in _table(a, b))
    w = torch.special.logit(share.double()).clamp(-_REACH, _REACH)
    place = (w + _REACH) * (_STEPS / (2 * _REACH))  # in steps
    node = place.long().clamp(max=_STEPS - 1)
    s = place - node  # in [0, 1]
    step = 2 * _REACH / _STEPS
    # Hermite's cubic with these values and slopes at both ends.
    rest = 1 - s
    z = rest * rest * ((1 + 2 * s) * z_table[node] + s * step * slope_table[node]) + s * s * (
        (1 + 2 * rest) * z_table[node + 1] - rest * step * slope_table[node + 1]
    )
    return torch.sigmoid(z).to(share.dtype)


def beta_cumulative(x: float, a: float, b: float) -> float:
    """The share of a beta distribution below x."""
    if not 0 < x < 1:
        return float(x >= 1)
    return float(_sigmoid(_logit_of_share(np.array([np.log(x) - np.log1p(-x)]), a, b))[0])


@lru_cache(maxsize=8)
def _table(a: float, b: float) -> tuple[Array, Array]:
    """Values and slopes of z(w) at even steps of w, each (_STEPS + 1,)."""
    w = np.linspace(-_REACH, _REACH, _STEPS + 1)
    below, above = np.full_like(w, -_FARTHEST), np.full_like(w, _FARTHEST)
    for _ in range(_HALVINGS):
        z = (below + above) / 2
        is_low = _logit_of_share(z, a, b) < w
        below, above = np.where(is_low, z, below), np.where(is_low, above, z)
    z = (below + above) / 2
    for _ in range(_NEWTON_STEPS):
        found = _logit_of_share(z, a, b)
        z = z - (found - w) * _slope(z, found, a, b)
    return z, _slope(z, w, a, b)


def _slope(z: Array, w: Array, a: float, b: float) -> Array:
    """Dz / dw = F (1 - F) / (f(x) x (1 - x)), by logarithms, because all of them may be tiny."""
    return np.exp(_log_sigmoid(w) + _log_sigmoid(-w) - _log_density(z, a, b))


def _log_density(z: Array, a: float, b: float) -> Array:
    """log(f(x) x (1 - x)): the density of z."""
    log_beta = lgamma(a) + lgamma(b) - lgamma(a + b)
    return a * _log_sigmoid(z) + b * _log_sigmoid(-z) - log_beta


def _logit_of_share(z: Array, a: float, b: float) -> Array:
    """w(z), accurate in both tails: the larger of the two shares follows from the smaller."""
    is_lower = _sigmoid(z) < (a + 1) / (a + b + 2)
    first, second = np.where(is_lower, a, b), np.where(is_lower, b, a)
    log_share = _log_density(z, a, b) + _log_fraction(_sigmoid(np.where(is_lower, z, -z)), first, second)
    log_share = np.minimum(log_share, -1e-16)
    logit = log_share - np.log(-np.expm1(log_share))
    return np.where(is_lower, logit, -logit)


def _log_fraction(x: Array, a: Array, b: Array) -> Array:
    """log(I_x(a, b) B(a, b) / (x^a (1 - x)^b)): a continued fraction (DLMF 8.17.22, https://dlmf.nist.gov/8.17#v).

    By Lentz's algorithm; c and d are its names, the ratios of successive numerators and denominators.
    """
    c = np.ones_like(x)
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d.copy()
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            value = value * c * d
        if np.abs(c * d - 1).max() < 1e-15:
            break
    result: Array = np.log(value / a)
    return result


def _sigmoid(z: Array) -> Array:
    return np.exp(_log_sigmoid(z))


def _log_sigmoid(z: Array) -> Array:
    result: Array = -np.logaddexp(0, -z)
    return result

"""Quantiles of the beta distribution for tensors on any device; torch has none, so scipy fills a table once.

With logit(y) = log(y / (1 - y)), let z = logit of the quantile and w = logit of the cumulative share. Both tails of
z(w) are straight lines (of the slopes 1 / a and 1 / b) and all between is smooth. So a cubic through values and slopes
at even steps of w gives the quantile to 1e-9 for all 0.1 <= a, b <= 100 (the limits that
`models.objectives.objective_settings` sets). It grows with w, because the steps are small.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainccinv, betaincinv, betaln, expit, log_expit
from torch import Tensor

_REACH = 17.0
"""The largest logit in the table, which begins at -17. A float32 number in (0, 1) has a logit within 16.7."""
_STEPS = 4096

Array = NDArray[np.float64]


def beta_quantile(share: Tensor, a: float, b: float) -> Tensor:
    """The quantiles of a beta distribution with parameters a and b, for each number of `share`, in its shape and dtype.

    A quantile is the x below which this share of the distribution lies. Shares below 1 / (1 + e^17) = 4e-8 count as
    this number, and shares above its complement as the complement.
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


@lru_cache(maxsize=8)
def _table(a: float, b: float) -> tuple[Array, Array]:
    """Values and slopes of z(w) at even steps of w, each (_STEPS + 1,)."""
    w = np.linspace(-_REACH, _REACH, _STEPS + 1)
    # The smaller of share and rest is exact; each function below gets it, so that both tails keep their digits.
    lower, upper = expit(w), expit(-w)
    below = np.where(w < 0, betaincinv(a, b, lower), betainccinv(a, b, upper))
    above = np.where(w < 0, betainccinv(b, a, lower), betaincinv(b, a, upper))  # 1 - x
    z = np.log(below) - np.log(above)
    # dz / dw = F (1 - F) / (f(x) x (1 - x)), by logarithms, because all of them may be tiny.
    log_density = a * log_expit(z) + b * log_expit(-z) - betaln(a, b)
    return z, np.exp(log_expit(w) + log_expit(-w) - log_density)

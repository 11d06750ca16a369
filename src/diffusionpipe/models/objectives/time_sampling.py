"""The times of a flow: a uniform number of a sample to its time, by the inverse of a cumulative distribution.

So a time is a function of the sample's keyed number alone, and it grows with the number. Shifts come after
(`models.objectives.flow_shift`).
"""

import math
from functools import partial

import torch
from scipy.special import betainc
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.models.objectives.beta_quantile import beta_quantile
from diffusionpipe.models.objectives.flow_shift import FlowShift
from diffusionpipe.models.objectives.objective_settings import ObjectiveSettings, TimeSampling

_LEAST_SHARE = 1e-6  # float32 numbers still tell 16 times apart in so small a part
# 2^-60 is below the distance of float64 numbers near 1.
_HALVINGS = 60


def sampled(settings: ObjectiveSettings, uniform: Tensor) -> Tensor:
    """The times of a flow before any shift, for uniform numbers in [0, 1), of the same shape and dtype."""
    match settings.time_sampling:
        case TimeSampling.UNIFORM:
            return uniform
        case TimeSampling.LOGIT_NORMAL:
            return torch.sigmoid(settings.logit_mean + settings.logit_std * torch.special.ndtri(uniform))
        case TimeSampling.MODE:
            # Esser et al. write f(u) = 1 - u - s (cos^2(pi u / 2) - 1 + u). This is f(1 - u): the same distribution,
            # because f(1 - u) = 1 - f(u), but it grows with u.
            return uniform + settings.mode_scale * (uniform - torch.sin(math.pi / 2 * uniform) ** 2)
        case TimeSampling.BETA:
            return beta_quantile(uniform, settings.beta_alpha, settings.beta_beta)
        case TimeSampling.SPEED:
            raise AssertionError("settings refuse it for flows")


def share_below(settings: ObjectiveSettings, time: float) -> float:
    """The share of the times of a flow, before any shift, that lie below `time`: the inverse of `sampled`."""
    if not 0 < time < 1:
        return float(time >= 1)
    match settings.time_sampling:
        case TimeSampling.UNIFORM:
            return time
        case TimeSampling.LOGIT_NORMAL:
            z = (math.log(time) - math.log1p(-time) - settings.logit_mean) / settings.logit_std
            return math.erfc(-z / math.sqrt(2)) / 2
        case TimeSampling.MODE:
            return _inverse_of_mode(settings.mode_scale, time)
        case TimeSampling.BETA:
            return float(betainc(settings.beta_alpha, settings.beta_beta, time))
        case TimeSampling.SPEED:
            raise AssertionError("settings refuse it for flows")


def flow_times(settings: ObjectiveSettings, shift: FlowShift, uniform: Tensor, num_tokens: int | None) -> Tensor:
    """The shifted times of a flow, within `settings.time_range`, for uniform numbers in [0, 1).

    They have the shape and dtype of `uniform`.

    Raises:
        ModelError: (nearly) no time lies in the range, or the shift needs a number of tokens.
    """
    low, high = settings.time_range
    if (low, high) == (0, 1):
        return shift.apply(sampled(settings, uniform), num_tokens)
    below, above = (share_below(settings, shift.undo(time, num_tokens)) for time in (low, high))
    if above - below < _LEAST_SHARE:
        raise ModelError(
            f"objective.time_range: a share of {above - below:.1e} of all times lies from {low:g} to {high:g}, because "
            "of the shift or of time_sampling; use a wider range"
        )
    times = sampled(settings, below + (above - below) * uniform.double())
    # Rounding may lead a hair out of the range.
    return shift.apply(times, num_tokens).clamp(low, high).to(uniform.dtype)


def _inverse_of_mode(scale: float, time: float) -> float:
    value = partial(_mode, scale)
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        below, above = (middle, above) if value(middle) < time else (below, middle)
    return (below + above) / 2


def _mode(scale: float, uniform: float) -> float:
    return uniform + scale * (uniform - math.sin(math.pi / 2 * uniform) ** 2)

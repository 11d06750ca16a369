"""The variance of each denoising step, learnt beside its mean.

Source: Nichol & Dhariwal, 2021, https://arxiv.org/abs/2102.09672, sections 3.1 and 3.4. The denoiser has twice the
channels of a picture. The first half predicts the noise and is trained as ever. The second half v, from -1 to 1, gives
the logarithms of the variances, between the smallest and the largest possible ones:

    log variance = f log(beta_t) + (1 - f) log(beta_t (1 - abar_{t-1}) / (1 - abar_t)),    f = (v + 1) / 2      [1]

That is diffusers' `variance_type = "learned_range"`. The loss of a sample gets 0.001 times its variational bound [2],
in bits a number, times the number of time steps, as in the authors' program. The bound moves v alone: the mean that it
reads is detached [3].

>>> abar = torch.tensor([0.9, 0.5], dtype=torch.float64)
>>> spans = log_range(abar, torch.tensor([1]))
>>> [round(float(bound.exp()), 4) for bound in spans]       # 1 - 0.5 / 0.9, and that times 0.1 / 0.5
[0.0889, 0.4444]
"""

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

_WEIGHT = 1e-3
_LEAST = 1e-20
"""diffusers' least variance: the variance of the first time step is zero."""
_HALF_LEVEL = 1 / 255
"""Half the distance of two of the 256 levels in [-1, 1]."""


class Noised(NamedTuple):
    """A batch of pictures before and after noise was added, with the noise and the time steps."""

    pixels: Tensor
    """The clean pictures, (B, C, H, W), with values in [-1, 1]."""
    noisy: Tensor
    """The pictures with noise, (B, C, H, W)."""
    noise: Tensor
    """The noise that the denoiser predicts, (B, C, H, W), for the mean; the caller has detached it [3]."""
    timesteps: Tensor
    """The time step of each sample, (B,)."""


def log_range(alphas_cumprod: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """(logarithm of the smallest variance, logarithm of the largest) at these time steps, (B,) each."""
    now, before = _alphas(alphas_cumprod, timesteps)
    beta = 1 - now / before
    smallest = ((1 - before) / (1 - now) * beta).clamp(min=_LEAST)
    return smallest.log(), beta.log()


def log_variance(values: Tensor, alphas_cumprod: Tensor, timesteps: Tensor) -> Tensor:
    """The logarithm of the variance of each denoising step, from the channels with which the denoiser states it [1].

    `values`: these channels, from -1 (smallest variance) to 1 (largest), (B, C, H, W), which is the result's shape too.
    """
    smallest, largest = (_wide(bound, values) for bound in log_range(alphas_cumprod, timesteps))
    share = (values + 1) / 2
    return share * largest + (1 - share) * smallest


def variance_loss(values: Tensor, noised: Noised, alphas_cumprod: Tensor) -> Tensor:
    """The part of each sample's loss that trains the variances, from the variational bound [2], (B,).

    The bound is the divergence of the predicted step from the true one, given the picture; at the first time step it is
    minus the logarithm of the likelihood of the picture's 256 levels. `values` as in `log_variance`.
    """
    dtype, t = values.dtype, noised.timesteps
    now, before = (_wide(a, values) for a in _alphas(alphas_cumprod.double(), t))
    clean = (noised.noisy - (1 - now).sqrt() * noised.noise) / now.sqrt()
    # In float64: 1 - abar loses the digits of float32 in the first steps.
    true, predicted = (_mean(pixels, noised.noisy, now, before).to(dtype) for pixels in (noised.pixels, clean))
    spread = log_variance(values, alphas_cumprod.double(), t).to(dtype)
    smallest = _wide(log_range(alphas_cumprod.double(), t)[0].to(dtype), values)
    divergence = 0.5 * (spread - smallest - 1 + (smallest - spread).exp() + (true - predicted) ** 2 * (-spread).exp())
    is_first = _wide(t == 0, values)
    nats = torch.where(is_first, -_log_likelihood(noised.pixels.to(dtype), predicted, spread), divergence)
    # log(2) makes bits of nats.
    return _WEIGHT * len(alphas_cumprod) * nats.flatten(1).mean(1) / log(2)


def _alphas(alphas_cumprod: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """(cumulative alphas of these time steps, cumulative alphas of the step before each, 1 before the first), (B,)."""
    before = torch.cat([alphas_cumprod.new_ones(1), alphas_cumprod[:-1]])
    return alphas_cumprod[timesteps], before[timesteps]


def _mean(pixels: Tensor, noisy: Tensor, now: Tensor, before: Tensor) -> Tensor:
    """The mean of the noisy picture of the step before, given the clean one (Ho et al., 2020, equation 7).

    `now`, `before`: the cumulative alphas of the step and of the step before.
    """
    beta = 1 - now / before
    return (before.sqrt() * beta * pixels + (now / before).sqrt() * (1 - before) * noisy) / (1 - now)


def _log_likelihood(pixels: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """The logarithm of the probability of each pixel's level, out of 256, in a normal distribution, (B, C, H, W).

    `spread`: the logarithm of its variance.
    """
    scale = (-0.5 * spread).exp()
    below = torch.special.ndtr((pixels - _HALF_LEVEL - mean) * scale)
    above = torch.special.ndtr((pixels + _HALF_LEVEL - mean) * scale)
    # The lowest and the highest level also take all values beyond them.
    below, above = torch.where(pixels < -0.999, 0, below), torch.where(pixels > 0.999, 1, above)
    return (above - below).clamp(min=1e-12).log()


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))

"""Fewer draws of the times at which a sample is nearly noise already.

Source: Wang et al., "A Closer Look at Time Steps is Worthy of Triple Speed-Up for Diffusion Model Training" (SpeeD),
2025, https://arxiv.org/abs/2405.17403. The deviation of the noise, sqrt(1 - abar_t), grows fast at first and hardly in
the end. A time step is drawn with a probability that depends on its growth g_t:

    p_t  ~  tanh(10^6 (g_t - 10^-4)) + 1.5                                                                        [1]

so fast steps are drawn five times as often as slow ones. The first slow step is m - 1. In pairs, the partner of a
sample at step t is at step |t - m|, so that the fast steps are seen evenly [2]. Differences from the source: growth
counts by thousandths of all steps, which is the same where there are 1,000, and the weights of the loss are left alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionpipe.errors import ModelError

_SLOW = 1e-4
"""The growth of the noise's deviation in a thousandth of all steps below which a step is slow."""
_STEEPNESS = 1e6
_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTimes:
    """A distribution of time steps with fewer draws of steps that are nearly noise."""

    cumulative: Tensor
    """The share of draws that fall on each step or an earlier one, float64 (steps,); 1 at the last step."""
    turn: int
    """The number m of the source, around which pairs are mirrored: the first slow step is m - 1."""

    def timesteps(self, time: Tensor, *, in_pairs: bool) -> Tensor:
        """The time steps, int64, for the uniform numbers `time` in [0, 1), of the same shape.

        Without pairs a larger number gives no smaller step. In pairs, a number below 1/2 is a first member, and the
        number 1/2 above it its partner (`pair_members`).
        """
        if not in_pairs:
            return self._drawn(time.double())
        # Both members of a pair get the same number in [0, 1), up to rounding at 1.
        is_partner = time >= 0.5
        first = self._drawn((2 * time.double() - is_partner.double()).clamp(max=1))
        return torch.where(is_partner, (first - self.turn).abs(), first)  # [2]

    def _drawn(self, share: Tensor) -> Tensor:
        found = torch.searchsorted(self.cumulative.to(share.device), share, right=True)
        return found.clamp(max=len(self.cumulative) - 1)


def speed_times(alphas_cumprod: Tensor, first: int, end: int) -> SpeedTimes:
    """The distribution over the time steps from `first` to `end` - 1 of a schedule.

    `alphas_cumprod`: the cumulative alphas of all its steps, (steps,).

    Raises:
        ModelError: all of the schedule's steps are fast, so that the draws would be even; or it has one step.
    """
    deviation = (1 - alphas_cumprod.double().cpu()).sqrt()
    if len(deviation) < 2:
        raise ModelError("objective: a schedule of one step has no times to choose from; remove time_sampling")
    # A thousandth of all steps is the paper's step.
    growth = torch.gradient(deviation)[0] * (len(deviation) / _STEPS)
    slow = (growth < _SLOW).nonzero()
    if not len(slow):
        raise ModelError(
            "objective: the noise of this model's scheduler grows fast at every time step, so the times of speed "
            "would be even; remove time_sampling"
        )
    density = torch.tanh(_STEEPNESS * (growth - _SLOW)) + 1.5  # [1]
    density[:first] = density[end:] = 0
    cumulative = density.cumsum(0)
    return SpeedTimes(cumulative=cumulative / cumulative[-1], turn=int(slow[0]) + 1)


def pair_members(uniform: Tensor, is_partner: Tensor) -> Tensor:
    """The uniform number of each member of a pair, (B,), from the number of its pair in [0, 1), `uniform`.

    First members get numbers below 1/2, and partners get numbers from 1/2 on.
    """
    return torch.where(is_partner, 0.5 + uniform / 2, uniform / 2)

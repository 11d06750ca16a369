"""Clipping by the norm of all gradients of the model, wherever its stages lie."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.weights.squares import sum_of_squares


def global_norm_clip(
    parameters: Sequence[nn.Parameter],
    max_norm: float | None,
    sum_over: Callable[[Tensor], Tensor],
    *,
    owned: Sequence[nn.Parameter] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Scales the gradients of this rank's parameters in place; returns the norm of the whole model's before that.

    `owned` are the parameters that this rank counts, all of `parameters` if None: of a parameter with replicas exactly
    one rank counts it, yet every rank scales its own copy. `sum_over` returns the sum of its argument, a tensor without
    dimensions, over all ranks. `device` is where a rank without gradients puts its zero.

    Each gradient's norm is taken in float32 (float64 for float64 gradients) and their squares are added in float64, so
    that neither the number of stages nor their order shows in more than the last digit. The factor is torch's
    `clip_grad_norm_`'s, min(1, max_norm / (norm + 1e-6)); nothing waits for the device. None as `max_norm` only
    measures. A norm that is not finite is returned as it is; the caller decides.
    """
    counted = [p.grad for p in (parameters if owned is None else owned) if p.grad is not None]
    scaled = [p.grad for p in parameters if p.grad is not None]
    norm = sum_over(sum_of_squares(counted, device or _device(scaled))).sqrt()
    if max_norm is not None:
        scale(scaled, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm, min(1, max_norm / (norm + 1e-6)), a tensor without dimensions."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place by the factor; nothing waits for the device."""
    for dtype in {gradient.dtype for gradient in gradients}:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(wide))


def _device(gradients: Sequence[Tensor]) -> torch.device:
    """The device of the gradients; the CPU if there are none."""
    return gradients[0].device if gradients else torch.device("cpu")

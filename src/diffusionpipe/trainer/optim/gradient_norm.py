"""Clipping by the norm of all gradients of the model, wherever its stages lie.

A rank adds the squares of the gradients that it counts (`runtime.weights.squares`), all ranks sum them, and each scales
its own gradients by one factor. Of a parameter with replicas one rank counts the gradient, and every rank scales its
copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.weights.squares import sum_of_squares


def clip_alone(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip gradients on a rank that has all parameters: scale them in place; returns their norm before that.

    With None as `max_norm` nothing is scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device = gradients[0].device if gradients else torch.device("cpu")
    norm = sum_of_squares(gradients, device).sqrt()
    if max_norm is not None:
        scale(gradients, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that clips gradients of this norm: min(1, max_norm / (norm + 1e-6)), as in torch's `clip_grad_norm_`.

    Nothing waits for the device. The factor of a norm that is not finite is not finite or 0; the caller decides.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place by the factor; nothing waits for the device."""
    for dtype in {gradient.dtype for gradient in gradients}:
        # Rounded to the type of narrow gradients, the factor itself would be wrong.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(wide))

"""The sum of squares of gradients of several dtypes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements of all gradients, float64, shape (), on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Sorted, because the order of a set of dtypes, and so the bits of the sum, may differ between processes.
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        # Squares of narrow values overflow and lose bits: sums are at least float32.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm([g for g in gradients if g.dtype == dtype], 2, dtype=wide)
        total = total + torch.stack(norms).double().square().sum()  # ()
    return total

"""Narrow copies of weights for autocast, made once in an iteration and read by all its micro-batches.

    cast    F0  F1  B0  F2  B1 ...  drop        every F reads the copy of w,
                                                every B adds to w's gradient through the cast

torch.autocast by itself casts in each of its contexts again, and every micro-batch in flight keeps its own copies. Its
cache, held over the iteration, would not do: it leaves out frozen weights, the split backward does not go through it,
and all threads of a process share one.

Weights must not change while their copies live, so copies live within one iteration. They are made with gradients even
where the caller wants none; a forward that wants none takes none from them. All micro-batches walk back through the
same cast, which saves nothing. It adds the narrow gradient of the copy to the weight's right away, without a wide one
between them: sums have the same bits, and no micro-batch makes a gradient that is as wide as the weights.

Recomputed layers (`LayerStage.cast`) and encoders have no copies here: they cast as autocast does, layer by layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from diffusionpipe.runtime.compute.backward import accumulate


class Casts:
    """The narrow copies of one rank's weights that forwards under autocast read. Mutable: empty between iterations."""

    def __init__(self) -> None:
        # By `id`, because `==` of tensors compares their elements.
        self._copies: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def copies(self) -> tuple[Tensor, ...]:
        """All copies of weights that exist now."""
        return tuple(self._copies.values())

    def make(self, weights: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Make a copy in `dtype` of each weight that is float32 and has no copy yet."""
        with torch.enable_grad():
            for weight in weights:
                if weight.dtype is torch.float32 and id(weight) not in self._copies:
                    copy: Tensor = _Cast.apply(weight, dtype)  # type: ignore[no-untyped-call]
                    self._copies[id(weight)] = copy

    def of(self, weight: Tensor) -> Tensor:
        """The weight's copy; the weight itself if there is none."""
        return self._copies.get(id(weight), weight)

    def drop(self) -> None:
        """Forget all copies of weights."""
        self._copies.clear()


class _Cast(Function):
    """The cast of a weight for autograd; its backward adds the narrow gradient to the weight's `.grad` by itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight = weight
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        accumulate(ctx.weight, gradients[0])
        # The gradient has been added. Autograd would first widen a gradient that is returned here.
        return None, None

"""The first convolution of a denoiser, widened so that it reads more than noisy samples."""

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import attribute


def widen(module: nn.Module, name: str, more: int) -> None:
    """Replace a convolution of `module` by one with `more` further input channels, whose weights are zero.

    `name`: the name of the convolution below `module`.

    Raises:
        ModelError: there is no plain convolution of that name.
    """
    old = attribute(module, name)
    if type(old) is not nn.Conv2d or old.groups != 1 or old.padding_mode != "zeros":
        raise ModelError(f"{name} is widened, which needs a plain convolution; here it is a {type(old).__name__}")
    # Its weights are put in below, so none are drawn.
    with torch.device("meta"):
        new = WidenedConvolution(
            old.in_channels + more,
            old.out_channels,
            old.kernel_size,  # type: ignore[arg-type]  # torch declares it wider than it takes it
            old.stride,  # type: ignore[arg-type]
            old.padding,  # type: ignore[arg-type]
            old.dilation,  # type: ignore[arg-type]
            bias=old.bias is not None,
        )
    new.plain = old.in_channels
    further = old.weight.new_zeros(old.out_channels, more, *old.kernel_size)
    weight = torch.cat([old.weight.detach(), further], dim=1)  # (C_out, C_in + more, K, K)
    new.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    new.train(old.training)
    path, _, own = name.rpartition(".")
    parent = attribute(module, path) if path else module
    setattr(parent, own, new)


class WidenedConvolution(nn.Conv2d):
    """A convolution that computes its first and its further input channels apart, and adds the results.

    Where the weights of the further inputs are zero, the result is bit for bit equal to a convolution of the first
    alone. One convolution of all inputs may round otherwise, because libraries choose its algorithm by the sizes.
    """

    plain: int
    """The number of the first input channels, which the convolution had before it was widened."""

    def forward(self, input: Tensor) -> Tensor:
        """The result, (B, C_out, H', W'), for an input with all channels, (B, C, H, W)."""
        here, there = self.weight.tensor_split([self.plain], dim=1)
        first, further = input.tensor_split([self.plain], dim=1)
        first = self._conv_forward(first, here, self.bias)  # (B, C_out, H', W')
        result: Tensor = first + self._conv_forward(further, there, None)
        return result

"""The product of activations with an int8 matrix in integers, but for outliers.

Dettmers et al., "LLM.int8()", NeurIPS 2022, https://arxiv.org/abs/2208.07339: a few inputs of a layer are far larger
than all others. In integers they would leave the others few steps, so they are multiplied wide, apart.

    numbers of x beyond 6:   wide product with the columns of w that belong to them
    all others:              8 bits; sum over blocks of (x_b codes_b^T), times scale of x's row and scale of w's block

Differences from the paper: a scale of w for each block of 128 inputs, not for each row, so the integers are added block
by block; of 512 normal inputs, rounding w then costs 0.87 of the error. And a number, not its whole column, is an
outlier, so that no sample's result depends on other samples.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from diffusionpipe.costs.forms import INPUTS_OF_A_SCALE

OUTLIER = 6.0
"""The magnitude beyond which a number is an outlier."""
_LEAST_ROWS, _UNIT = 17, 8
"""The least rows that torch's product of integers takes, and the number of which the other sides are multiples."""


def int8_product(x: Tensor, codes: Tensor, scales: Tensor, wide: Tensor) -> Tensor:
    """The product x w^T for x of the shape (..., inputs), in the dtype of x.

    `codes`, `scales`: w in the form int8. `wide`: w in the dtype of x, of which columns with outliers are read.
    """
    found: Tensor = torch.ops.diffusionpipe.int8_product(x.reshape(-1, x.shape[-1]), codes, scales, wide)
    return found.view(*x.shape[:-1], len(codes))


@torch.library.custom_op("diffusionpipe::int8_product", mutates_args=())
def _product(x: Tensor, codes: Tensor, scales: Tensor, wide: Tensor) -> Tensor:
    is_outlier = x.abs() > OUTLIER
    # Outliers are left out before the scale of a row is found.
    numbers, of_rows = _rounded(x.masked_fill(is_outlier, 0))
    found = integer_product(numbers, codes, scales)
    found *= of_rows
    columns = is_outlier.any(0).nonzero().squeeze(1)
    if len(columns):
        found += (x * is_outlier)[:, columns] @ wide[:, columns].t()
    return found.to(x.dtype)


@_product.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, wide: Tensor) -> Tensor:
    return x.new_empty((len(x), len(codes)))


@register_flop_formula(torch.ops.diffusionpipe.int8_product)
def _flops(x: Any, codes: Any, *_: Any, **__: Any) -> int:
    """The number of operations of a wide product of these shapes, as an estimate of integers and outliers together."""
    return 2 * int(x[0]) * int(x[1]) * int(codes[0])


def integer_product(numbers: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The product `numbers` w^T of rows of 8-bit integers with w in the form int8, in float32, (rows, outputs).

    The sums within a block of inputs are exact.
    """
    found = torch.zeros((len(numbers), len(codes)), dtype=torch.float32, device=numbers.device)
    weights = codes.view(torch.int8)
    # A scale belongs to a block of inputs, so integers are summed within blocks and no further.
    for block, start in enumerate(range(0, numbers.shape[1], INPUTS_OF_A_SCALE)):
        inputs = slice(start, start + INPUTS_OF_A_SCALE)
        found += _integers(numbers[:, inputs], weights[:, inputs]).float() * scales[:, block]
    return found


def _rounded(flat: Tensor) -> tuple[Tensor, Tensor]:
    """(rows rounded to 8-bit integers, scale of each row, (rows, 1))."""
    scale = flat.abs().amax(1, keepdim=True).float() / 127
    return (flat.float() / torch.where(scale > 0, scale, 1.0)).round_().to(torch.int8), scale


def _integers(left: Tensor, right: Tensor) -> Tensor:
    """The product left right^T of 8-bit integers in int32; sides that torch does not take are padded with zeros."""
    rows, outputs = len(left), len(right)
    left = torch.nn.functional.pad(left, (0, -left.shape[1] % _UNIT, 0, max(0, _LEAST_ROWS - rows)))
    right = torch.nn.functional.pad(right, (0, -right.shape[1] % _UNIT, 0, -outputs % _UNIT))
    found: Tensor = torch._int_mm(left.contiguous(), right.t())
    return found[:rows, :outputs]

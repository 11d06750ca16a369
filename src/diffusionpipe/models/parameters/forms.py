"""Frozen matrices in one byte or four bits a number: encoded from wide ones, and widened again.

nf4 is the 4-bit NormalFloat of Dettmers et al., "QLoRA", 2023, https://arxiv.org/abs/2305.14314: its 16 values are
quantiles of a normal distribution. Here the scales of blocks are stored as squares of bytes, without a mean: an outlier
in one block then costs the other blocks less than even steps would. Scales along the inputs of a row, in place of one
scale a row, keep the error of an outlier within its 128 inputs.

Encoding goes through a matrix in pieces, so that it needs little memory beside the matrix.
"""

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from diffusionpipe.costs.forms import BLOCK, GROUP, INPUTS_OF_A_SCALE, Form, has_rows, shapes
from diffusionpipe.models.parameters.kernels import kernel_on, number_type, suits

_PIECE = 1 << 18
"""How many numbers are encoded or widened at a time; a multiple of BLOCK * GROUP."""


@cache
def nf4_values() -> tuple[float, ...]:
    """The 16 values of nf4, from -1 to 1: quantiles of a normal distribution, 8 above zero and 7 below it.

    Dettmers et al., 2023, section 3: quantiles at even distances, of which the outermost lies halfway between those
    that 15 and 16 values would have.

    >>> [round(value, 3) for value in nf4_values()[::3]]
    [-1.0, -0.395, -0.091, 0.161, 0.441, 1.0]
    """
    outermost = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (outermost - 0.5) * step / 8) for step in range(1, 9)]
    below = [-quantile(0.5 + (outermost - 0.5) * step / 7) for step in range(7, 0, -1)]
    return tuple(value / above[-1] for value in (*below, 0.0, *above))


def encode(form: Form, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) that store a matrix (outputs, inputs) in a narrow form, on the matrix's device.

    Raises:
        ConfigError: there is no such form.
    """
    return _encode_rows(form, weight) if has_rows(form) else _encode_nf4(weight)


def wide(form: Form, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix of `shape` that codes and scales store: each number times its scale in float32, rounded to `dtype`.

    Counters of operations see one operation, `diffusionpipe::widen`, which reads codes and writes the matrix.
    """
    found: Tensor = torch.ops.diffusionpipe.widen(codes, scales, form.value, *shape, dtype)
    return found


@torch.library.custom_op("diffusionpipe::widen", mutates_args=())
def _widen(codes: Tensor, scales: Tensor, form: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    kind, shape, kernel = Form(form), (rows, columns), kernel_on(codes.device.type)
    if kernel is None or not suits(kind, columns):
        return widened_by_torch(codes, scales, kind, shape, dtype)
    return kernel(*parts_for_kernels(codes, scales, kind, shape), kind, shape, dtype)


def widened_by_torch(codes: Tensor, scales: Tensor, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix of `shape` that codes and scales store, in `dtype`, by torch's own operations on any device."""
    found = torch.empty(shape, dtype=dtype, device=codes.device)
    if has_rows(form):
        _widen_rows(codes.view(number_type(form)), scales, found)
    else:
        _widen_nf4(codes, scales, found.view(-1))
    return found


def parts_for_kernels(codes: Tensor, scales: Tensor, form: Form, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(bytes of the numbers, scale of each block) of a stored matrix, as a `Kernel` reads them."""
    if has_rows(form):
        return codes, scales
    pairs, of_blocks = _parts_of_nf4(codes, shape[0] * shape[1])
    return pairs, _scales_of_blocks(of_blocks, scales)


@_widen.register_fake
def _(codes: Tensor, scales: Tensor, form: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


def _encode_rows(form: Form, weight: Tensor) -> tuple[Tensor, Tensor]:
    codes_shape, scales_shape = shapes(form, *weight.shape)
    codes = torch.empty(codes_shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(scales_shape, dtype=torch.float32, device=weight.device)
    dtype = number_type(form)
    largest = float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)
    for rows in _row_pieces(weight):
        for inputs, blocks in _input_parts(weight.shape[1]):
            numbers = weight[rows, inputs].float().unflatten(1, (-1, _width(inputs)))  # (R, blocks, width)
            scale = numbers.abs().amax(2) / largest
            scales[rows, blocks] = scale
            numbers = numbers / torch.where(scale > 0, scale, 1.0)[..., None]
            numbers.clamp_(-largest, largest)  # a scale below the least normal float32 is rounded by up to a half
            found = numbers if dtype.is_floating_point else numbers.round_()
            codes[rows, inputs] = found.to(dtype).view(torch.uint8).flatten(1)
    return codes, scales


def _widen_rows(numbers: Tensor, scales: Tensor, into: Tensor) -> None:
    if numbers.dtype is torch.float8_e4m3fn:
        numbers = numbers.to(torch.bfloat16)  # the same numbers; torch has no product of this type
    for inputs, blocks in _input_parts(numbers.shape[1]):
        torch.mul(
            numbers[:, inputs].unflatten(1, (-1, _width(inputs))),
            scales[:, blocks, None],
            out=into[:, inputs].unflatten(1, (-1, _width(inputs))),
        )


def _row_pieces(weight: Tensor) -> Iterator[slice]:
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _input_parts(columns: int) -> Iterator[tuple[slice, slice]]:
    """(range of inputs, range of their blocks): all whole blocks together, then the last block if it is shorter."""
    whole = columns // INPUTS_OF_A_SCALE
    if whole:
        yield slice(0, whole * INPUTS_OF_A_SCALE), slice(0, whole)
    if columns % INPUTS_OF_A_SCALE:
        yield slice(whole * INPUTS_OF_A_SCALE, columns), slice(whole, whole + 1)


def _width(inputs: slice) -> int:
    length: int = inputs.stop - inputs.start
    return min(INPUTS_OF_A_SCALE, length)


def _encode_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    (num_codes,), (num_groups,) = shapes(Form.NF4, *weight.shape)
    flat, device = weight.reshape(-1), weight.device
    codes = torch.empty(num_codes, dtype=torch.uint8, device=device)
    scales = torch.empty(num_groups, dtype=torch.float32, device=device)
    pairs, of_blocks = _parts_of_nf4(codes, len(flat))
    values = torch.tensor(nf4_values(), device=device)
    # The nearest value: borders are in the middle of neighbours.
    borders = (values[1:] + values[:-1]) / 2
    for start in range(0, len(flat), _PIECE):
        numbers = _padded(flat[start : start + _PIECE].float(), BLOCK).view(-1, BLOCK)
        largest = numbers.abs().amax(1)
        groups = _padded(largest, GROUP).view(-1, GROUP).amax(1)
        scales[start // (BLOCK * GROUP) :][: len(groups)] = groups
        # The last group may have fewer blocks.
        per_block = groups.repeat_interleave(GROUP)[: len(largest)]
        # At least 1 where there is anything: a scale of zero would lose the whole block.
        steps = (largest / torch.where(per_block > 0, per_block, 1.0)).sqrt().mul(255).round_()
        steps = torch.where(largest > 0, steps.clamp_(min=1), 0.0)
        of_blocks[start // BLOCK :][: len(steps)] = steps.to(torch.uint8)
        scale = _scales_of_blocks(steps, groups)
        places = torch.bucketize(numbers / torch.where(scale > 0, scale, 1.0)[:, None], borders, out_int32=True)
        high, low = places.to(torch.uint8).view(-1, 2).unbind(1)
        # The last byte may hold one number; the padding of the last block is not stored.
        pairs[start // 2 : start // 2 + _PIECE // 2].copy_((high * 16 + low)[: len(pairs) - start // 2])
    return codes, scales


def _widen_nf4(codes: Tensor, scales: Tensor, into: Tensor) -> None:
    pairs, of_blocks = _parts_of_nf4(codes, len(into))
    values = torch.tensor(nf4_values(), device=codes.device)
    # A table of 256 rows: one look-up gives both numbers of a byte.
    both = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)  # (256, 2): high and low half
    scale = _scales_of_blocks(of_blocks, scales)
    for start in range(0, len(into), _PIECE):
        bytes_here = pairs[start // 2 : start // 2 + _PIECE // 2]
        numbers = _padded(both.index_select(0, bytes_here.int()).view(-1), BLOCK).view(-1, BLOCK)
        numbers = numbers.mul_(scale[start // BLOCK :][: len(numbers), None]).view(-1)
        piece = into[start : start + _PIECE]
        piece.copy_(numbers[: len(piece)])


def _parts_of_nf4(codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(bytes with two numbers each, a byte for each block's scale): the parts of nf4 codes of `count` numbers."""
    pairs = (count + 1) // 2
    return codes[:pairs], codes[pairs:]


def _scales_of_blocks(steps: Tensor, groups: Tensor) -> Tensor:
    """The scale of each block: (its byte, `steps`, divided by 255) squared, times the largest scale of its group."""
    return (steps.float() / 255).square_() * groups.repeat_interleave(GROUP)[: len(steps)]


def _padded(flat: Tensor, unit: int) -> Tensor:
    """The numbers, (n,), with zeros after them up to a multiple of `unit`."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % unit))

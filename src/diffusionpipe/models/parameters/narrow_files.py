"""Files whose matrices are stored narrow with scales beside them: read as wide matrices, or refused by name.

    bitsandbytes, 4 bits    X.weight (uint8), X.weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 or __fp4, and
                            .nested_absmax, .nested_quant_map where scales are stored in 8 bits
    bitsandbytes, int8      X.weight (int8), X.SCB: 127 times the scale of each row
    float8 with scales      X.weight (float8), X.weight_scale or X.scale_weight: one number, or one for each row;
                            X.weight_scale_inv: one for each block of 128 x 128

A matrix is widened when it is asked for, one at a time. The recipe's `frozen_dtype` may store it narrow again.
"""

import json
from collections.abc import Collection, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.errors import ModelError

_BLOCK = 128
"""The side of a block with one scale in files with `weight_scale_inv`."""
_STATE = ".quant_state.bitsandbytes__"
_BESIDE_4_BITS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_BESIDE_INT8 = (".SCB", ".weight_format")
_SCALES = (".weight_scale", ".scale_weight", ".weight_scale_inv")
_UNREAD = (".scale_input", ".input_scale")
"""The ends of the names of scales of activations, for products in float8, which are not read."""
_MARKS = ("scaled_fp8",)
_UNKNOWN = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".comfy_quant": "ComfyUI's mixed precision",
    ".weight_scale_2": "NVFP4",
    ".svd_up": "SVDQuant",
}
"""The end of a name -> the method that writes it, whose files are not read."""


def narrow_matrices(names: Collection[str]) -> dict[str, str]:
    """Name of each narrow matrix in a file -> end of the name of the tensor beside it that says how it is stored.

    >>> narrow_matrices(["a.weight", "a.weight.absmax", "a.weight.quant_state.bitsandbytes__nf4", "b.weight", "b.SCB"])
    {'a.weight': '.quant_state.bitsandbytes__nf4', 'b.weight': '.SCB'}
    """
    found = {}
    for name in names:
        matrix, state, kind = name.partition(_STATE)
        if state:
            found[matrix] = state + kind
        for end in (".SCB", *_SCALES):
            if name.endswith(end):
                found[f"{name.removesuffix(end)}.weight"] = end
    return {matrix: end for matrix, end in found.items() if matrix in names}


def refuse_unknown_storage(names: Collection[str], file: Path) -> None:
    """Check that no weights in a file are stored by a method that cannot be read.

    `names`: the names of the file's tensors, which show the method. Raises ModelError if some are.
    """
    for name in names:
        for end, method in _UNKNOWN.items():
            if name.endswith(end):
                raise ModelError(
                    f"{file} holds weights of {method} ({name}), which are not read; get the model in bfloat16, and "
                    'let model.frozen_dtype = "nf4" or "int8" store it'
                )


class WidenedFile:
    """An open file of tensors that returns narrow matrices as wide ones; see `Tensors`."""

    def __init__(self, tensors: Any, file: Path) -> None:
        self._tensors, self._file = tensors, file
        self._ends = narrow_matrices(set(tensors.names()))
        self._states: dict[str, Mapping[str, Any]] = {}

    def names(self) -> list[str]:
        """The names of the file's tensors, without tensors that only say how others are stored."""
        return [name for name in self._tensors.names() if not self._is_beside(name)]

    def _is_beside(self, name: str) -> bool:
        if name in _MARKS or _STATE in name:
            return True
        ends = (*_BESIDE_4_BITS, *_BESIDE_INT8, *_SCALES, *_UNREAD)
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            return False
        owner = name.removesuffix(end)
        return owner in self._ends or f"{owner}.weight" in self._ends

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape with which `get` returns a tensor."""
        if _STATE in self._ends.get(key, ""):
            return tuple(self._state(key)["shape"])
        found: tuple[int, ...] = self._tensors.shape(key)
        return found

    def metadata(self) -> dict[str, str]:
        """Key -> text in the file's header; {} if it has none."""
        found: dict[str, str] = self._tensors.metadata()
        return found

    def get(self, key: str) -> Tensor:
        """A copy of a tensor in host memory; a narrow matrix becomes bfloat16, or float32 if its file states that.

        Raises ModelError if scales do not fit the matrix.
        """
        stored: Tensor = self._tensors.get(key)
        end = self._ends.get(key)
        if end is None:
            return stored
        if _STATE in end:
            return self._from_four_bits(key, stored)
        scales: Tensor = self._tensors.get(key.removesuffix(".weight") + end).float()
        if end == ".SCB":
            # bitsandbytes stores the largest magnitude of each row.
            return _times(stored, scales / 127, self._file, key).to(torch.bfloat16)
        if end == ".weight_scale_inv":
            for axis, (side, count) in enumerate(zip(stored.shape, scales.shape, strict=True)):
                block = self._block_side(key, side, count)
                scales = scales.repeat_interleave(block, axis).narrow(axis, 0, side)
        return _times(stored, scales, self._file, key).to(torch.bfloat16)

    def _block_side(self, key: str, side: int, count: int) -> int:
        """The number of rows (or columns) of a block with one scale, along a side with `count` scales.

        `side`: the number of all rows (or columns) of the matrix `key`. Files do not state the size of blocks. All
        published ones have blocks of 128, of which the last may be shorter.

        Raises:
            ModelError: the blocks do not have 128 numbers, nor equal sizes.
        """
        if ceil(side / _BLOCK) == count:
            return _BLOCK
        if not count or side % count:
            raise ModelError(
                f"{self._file}: {key} has {count} scales for a side of {side} numbers, so its blocks do not have "
                f"{_BLOCK} numbers each; get the model in bfloat16, or with blocks of {_BLOCK}"
            )
        return side // count

    def _state(self, key: str) -> Mapping[str, Any]:
        if key not in self._states:
            text = bytes(self._tensors.get(key + self._ends[key]).tolist())
            try:
                self._states[key] = json.loads(text)
            except ValueError as error:
                raise ModelError(f"{self._file} cannot be read: {key} has a damaged state; get it again") from error
        return self._states[key]

    def _from_four_bits(self, key: str, stored: Tensor) -> Tensor:
        """The wide matrix `key`, of the file's shape and dtype, from its 4-bit numbers and the scales of blocks.

        A byte of `stored` holds two indices into a table of 16 values, the upper half first.
        """
        state = self._state(key)
        scales: Tensor = self._tensors.get(f"{key}.absmax")
        if "nested_blocksize" in state:
            table = self._tensors.get(f"{key}.nested_quant_map").float()
            groups = self._tensors.get(f"{key}.nested_absmax").float().repeat_interleave(state["nested_blocksize"])
            # Scales are quantised themselves: a place in a table, times a group's scale, and one offset for all.
            scales = table[scales.int()] * groups[: len(scales)] + float(state["nested_offset"])
        count = prod(state["shape"])
        values: Tensor = self._tensors.get(f"{key}.quant_map").float()
        flat = stored.view(-1)
        # The upper half of a byte is the first number.
        numbers = values[torch.stack([flat >> 4, flat & 15], dim=1).view(-1).int()][:count]
        numbers *= scales.float().repeat_interleave(state["blocksize"])[:count]
        dtype = torch.float32 if state["dtype"] == "float32" else torch.bfloat16
        return numbers.view(*state["shape"]).to(dtype)


def _times(stored: Tensor, scales: Tensor, file: Path, key: str) -> Tensor:
    """The matrix in float32 times its scales: one for all, one for each row, or one for each number.

    Raises ModelError if the number of scales is another.
    """
    if scales.numel() not in (1, len(stored), stored.numel()):
        raise ModelError(f"{file}: {scales.numel()} scales do not fit {key} of shape {tuple(stored.shape)}")
    if scales.numel() == len(stored):
        scales = scales.view(-1, 1)
    elif scales.numel() == stored.numel():
        scales = scales.view_as(stored)
    else:
        scales = scales.view(1, 1)
    return stored.float() * scales

"""Runs rows through layers a fixed number at a time: a product of matrices rounds by its number of rows."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Run = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A function from named tensors to named tensors, with the same rows."""


def in_parts(run: Run, inputs: Mapping[str, Tensor], size: int | None) -> dict[str, Tensor]:
    """The results of `run` for all rows by name, computed on `size` rows at a time; with None on all rows at once.

    The last part is filled up with copies of its last row. Their results are cut off.

    >>> ones = {"x": torch.ones(5, 2)}
    >>> in_parts(lambda part: {"count": torch.full((len(part["x"]),), len(part["x"]))}, ones, 2)
    {'count': tensor([2, 2, 2, 2, 2])}
    """
    num_rows = len(next(iter(inputs.values())))
    size = size or num_rows
    outputs: dict[str, list[Tensor]] = {}
    for start in range(0, num_rows, size):
        # Contiguous as in the stores of ranks: sums of products round by the layout of memory.
        part = {name: value[start : start + size].contiguous() for name, value in inputs.items()}
        missing = size - len(next(iter(part.values())))
        if missing:
            part = {
                name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) for name, value in part.items()
            }
        for name, value in run(part).items():
            outputs.setdefault(name, []).append(value)
    return {name: torch.cat(values)[:num_rows] for name, values in outputs.items()}

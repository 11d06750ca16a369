"""Rows of the batch that are not activations: raw inputs and the outputs of frozen layers."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import Range
from diffusionpipe.runtime.machine.buffers import memory_of


class RowStore:
    """Named tensors by rows of this pipeline's batch.

    Each name has a buffer for its own range of rows (the whole batch for what this worker's stages read, the encoded
    share for what it only passes on). Views of the buffers are sent and received directly.
    """

    def __init__(self, extents: Mapping[str, Range], specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        """`extents`: the rows kept of each tensor."""
        self._extents = dict(extents)
        self._buffers = {
            name: torch.zeros((len(rows), *specs[name].shape), dtype=getattr(torch, specs[name].dtype), device=device)
            for name, rows in extents.items()
        }

        self._memory = {memory_of(buffer) for buffer in self._buffers.values()}

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    @property
    def extents(self) -> Mapping[str, Range]:
        """The rows kept of each tensor."""
        return self._extents

    def clear(self) -> None:
        """Forget all rows, for good."""
        self._buffers.clear()
        self._memory.clear()

    def view(self, name: str, rows: Range) -> Tensor:
        """The rows of a tensor, as a view: (len(rows), ...)."""
        start = self._extents[name].start
        # `.data` gives the view a version counter of its own: rows that arrive later do not touch those in use.
        return self._buffers[name].data[rows.start - start : rows.stop - start]

    def lasting(self, tensor: Tensor) -> Tensor:
        """The tensor, copied if it lies in rows, which are written again in another iteration."""
        return tensor.clone() if memory_of(tensor) in self._memory else tensor

    def feed(self, rows: Range, inputs: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        """Copy raw inputs into these rows, name -> (len(rows), ...), with the table of each."""
        for name, value in inputs.items():
            self.write(name, rows, value, tables.get(name))

    def write(self, name: str, rows: Range, value: Tensor, table: Tensor | None = None) -> None:
        """Copy into the rows; dtype and device follow the buffer.

        With a `table`, (256,), a `value` in uint8 says which of its elements are written; all three are on one device.
        """
        view = self.view(name, rows)
        if table is None or value.dtype != torch.uint8:
            view.copy_(value, non_blocking=True)
            return
        for row, indices in zip(view, value, strict=True):  # in turn, because a look-up needs them as int32
            row.copy_(table.index_select(0, indices.flatten().int()).view(indices.shape))

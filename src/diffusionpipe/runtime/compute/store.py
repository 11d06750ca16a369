"""Rows of the batch that are not activations: raw inputs and the outputs of frozen layers.

Where samples have several sizes, the rows lie in cells, one for each micro-batch, whose samples have one size. A cell's
place has room for the largest size:

    cells        0 (rows 0, 1)        1 (rows 2, 3)        2 (rows 4, 5)
    memory      |row 0|row 1|......|row 2|row 3|........|row 4  |row 5  |      size 1 is smaller than size 0
    sizes        1                    1                    0
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from math import prod

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import Range
from diffusionpipe.runtime.machine.buffers import memory_of
from diffusionpipe.units import Bytes


class RowStore:
    """Memory for the raw inputs and frozen layers' outputs of a pipeline's batch: named tensors, by rows of the batch.

    Each name has a buffer for its own range of rows (the whole batch for what this worker's stages read, the encoded
    share for what it only passes on). Views of the buffers are sent and received directly.
    """

    def __init__(
        self,
        extents: Mapping[str, Range],
        specs: Mapping[str, TensorSpec],
        device: torch.device,
        *,
        others: Sequence[Mapping[str, TensorSpec]] = (),
        cells: Sequence[Range] = (),
    ) -> None:
        """`extents`: the rows that are kept of each tensor. `specs`: its shape and dtype.

        `others`: the same as `specs` for samples of further sizes; then `cells` are the rows of each micro-batch.
        """
        self._extents = dict(extents)
        self._specs = (specs, *others)
        self._cut(cells if others else ())
        self.given: dict[int, frozenset[str]] = {}
        """Row -> the names of frozen layers' tensors that were put in from outside; for rows without an entry, none."""
        self._room = {name: max(prod(own[name].shape) for own in self._specs) for name in extents}
        self._buffers = {
            # Zeros are read where nothing is written: the estimate of a micro-batch that is not probed.
            name: torch.zeros(len(rows) * self._room[name], dtype=getattr(torch, specs[name].dtype), device=device)
            for name, rows in extents.items()
        }
        self._memory = {memory_of(buffer) for buffer in self._buffers.values()}

    def _cut(self, cells: Sequence[Range]) -> None:
        self.cells = tuple(cells)
        """The rows of each micro-batch; () where samples have one size."""
        self._starts = [cell.start for cell in self.cells]
        self.sizes: tuple[int, ...] = (0,) * len(self.cells)
        """The index of each cell's size among the sizes of samples."""

    def in_cells(self, cells: Sequence[Range]) -> "RowStore":
        """A store on the same memory, with the given rows for each micro-batch."""
        # A shallow copy has the same buffers.
        other = copy(self)
        other._cut(cells)
        return other

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    @property
    def extents(self) -> Mapping[str, Range]:
        """Name of a tensor -> the rows of the batch that the store keeps of it."""
        return self._extents

    def clear(self) -> None:
        """Give back the memory of all rows; the store is of no use afterwards."""
        self._buffers.clear()
        self._memory.clear()

    @property
    def num_bytes(self) -> Bytes:
        """Bytes of the memory of all rows, which do not depend on the sizes of the samples in them."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def size_of(self, rows: Range) -> int:
        """The index of the size of the samples in these rows of one micro-batch; 0 where all samples have one size."""
        return self.sizes[self._cell_of(rows.start)] if self.cells else 0

    def split(self, rows: Range) -> list[Range]:
        """The rows cut at the borders of micro-batches; [rows] where all samples have one size."""
        if not self.cells:
            return [rows]
        own = (cell.intersection(rows) for cell in self.cells)
        return [part for part in own if len(part)]

    def split_alike(self, rows: Range) -> list[tuple[Range, frozenset[str]]]:
        """The rows cut into runs, each with the names of the frozen tensors that were put in for all its rows."""
        runs: list[tuple[Range, frozenset[str]]] = []
        for row in range(rows.start, rows.stop):
            own = self.given.get(row, frozenset())
            if runs and runs[-1][1] == own:
                runs[-1] = Range(runs[-1][0].start, row + 1), own
            else:
                runs.append((Range(row, row + 1), own))
        return runs

    def sizes_in(self, rows: Range) -> tuple[int, ...]:
        """The index of the samples' size in each micro-batch with some of these rows; () where all have one size."""
        return tuple(self.size_of(part) for part in self.split(rows)) if self.cells else ()

    def view(self, name: str, rows: Range) -> Tensor:
        """A view of a tensor's rows, (len(rows), ...); where samples have several sizes, of one micro-batch."""
        extent, shape, room = self._extents[name], self._specs[self.size_of(rows)][name].shape, self._room[name]
        first = extent.start
        if self.cells:
            cell = self.cells[self._cell_of(rows.start)]
            assert rows.stop <= cell.stop, "rows of several cells have no common shape"
            # The store may keep rows from the middle of a cell on.
            first = max(cell.start, extent.start)
        # Rows before the cell take `room` elements each, rows in the cell only what their size needs.
        one = prod(shape)
        start = (first - extent.start) * room + (rows.start - first) * one
        # `.data` gives the view a version counter of its own: rows that arrive later do not touch those in use.
        return self._buffers[name].data[start : start + len(rows) * one].view(len(rows), *shape)

    def views(self, name: str, rows: Range) -> list[Tensor]:
        """Views of a tensor's rows, one for each micro-batch that has some; one where all samples have one size."""
        return [self.view(name, part) for part in self.split(rows)]

    def _cell_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def lasting(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy if it lies in the store's memory, which another iteration overwrites."""
        return tensor.clone() if memory_of(tensor) in self._memory else tensor

    def feed(self, rows: Range, inputs: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> None:
        """Copy raw inputs, name -> (len(rows), ...), into these rows; `tables`: by name, the `table` of `write`."""
        for name, value in inputs.items():
            self.write(name, rows, value, tables.get(name))

    def write(self, name: str, rows: Range, value: Tensor, table: Tensor | None = None) -> None:
        """Copy a tensor, (len(rows), ...), into the rows, converted to the buffer's dtype and device.

        With a `table`, (256,), a `value` in uint8 holds indices of the table's elements, which are written; all three
        are on one device.
        """
        for part in self.split(rows):
            view, own = self.view(name, part), value[part.start - rows.start : part.stop - rows.start]
            if table is None or value.dtype != torch.uint8:
                view.copy_(own, non_blocking=True)
                continue
            # The look-up wants indices as int32, four times as long as uint8: row by row little memory holds them.
            for row, indices in zip(view, own, strict=True):
                row.copy_(table.index_select(0, indices.flatten().int()).view(indices.shape))

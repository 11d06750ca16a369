"""Named tensors of all ranks to and from a folder: a file of safetensors for each rank, and one index in JSON.

    rank-0.safetensors  rank-1.safetensors
    tensors.json                               the name, file, place, type and shape of each tensor, as columns

A reader needs the index and the values; the headers of the files are for other programs, which can open each file by
itself. Folders of the first format have files of torch.distributed.checkpoint, which `distcp_files` reads.
"""

import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import write_durably
from diffusionpipe.runtime.comm.exchange import collect, form_of, rows_of
from diffusionpipe.runtime.job.agreement import agree, rank_in, together
from diffusionpipe.trainer.checkpoints.distcp_files import METADATA, read_distcp_table, read_distcp_tensor
from diffusionpipe.trainer.checkpoints.manifest import FileRecord
from diffusionpipe.trainer.checkpoints.tensor_plans import (
    DTYPES,
    FilePlan,
    Offer,
    StoredTensor,
    check_offers,
    file_plan,
    offer_of,
    shares_of,
)
from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INDEX = "tensors.json"
_FILE = re.compile(r"rank-\d+\.safetensors")
_PIECE: Bytes = 64 * 2**20
"""The size in bytes of one piece of a file that is written in pieces."""


class TensorWriting:
    """The writing of all ranks' tensors into a folder, as one rank does it, in steps that may be far apart in time.

    All ranks of the group take the steps in this order. They take `plan` together, through messages; a rank takes
    `write` and `finish` by itself, and another thread may do it.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Takes the folder, which exists and is empty, and the group of ranks; nothing is written yet."""
        self._folder, self._group = folder, group
        self._rank = rank_in(group)
        self._tensors: Mapping[str, Tensor] = {}
        self._file = file_plan(_name_of(self._rank), ())
        self._files: tuple[FilePlan, ...] = ()

    def plan(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Agrees with all ranks on each tensor's writer, and returns the names of the tensors that this rank writes.

        One of the ranks that hold a name writes it, chosen so that all ranks write about the same number of bytes.

        Raises:
            CheckpointError: on all ranks; a tensor is not dense, or ranks hold different shapes or types under one
                name.
        """
        own = together(lambda: tuple(offer_of(name, tensor) for name, tensor in tensors.items()), self._group)
        sent = collect(own, rows_of(Offer), self._group)  # read on the first rank alone, whose choice is below

        def plan_all() -> tuple[tuple[int, ...], ...]:
            if self._rank != 0:
                return ()
            offers = [read() for read in sent]
            check_offers(offers)
            shares = shares_of(offers)
            self._files = tuple(_file_of(rank, offers[rank], share) for rank, share in enumerate(shares))
            return shares

        # Positions go back to the ranks, not names, which all have already.
        shares = agree(plan_all, self._group, form=form_of(tuple[tuple[int, ...], ...]))[0]
        self._file = _file_of(self._rank, own, shares[self._rank])
        self._tensors = {stored.name: tensors[stored.name] for stored in self._file.tensors}
        return tuple(self._tensors)

    def write(
        self, copies: Mapping[str, Tensor] | None = None, between: Callable[[], None] | None = None
    ) -> tuple[str, ...]:
        """Writes this rank's tensors, or their copies in host memory, to its file, and returns the file's name.

        Without tensors there is no file, and it returns (). `between` is called after every piece of at most 64 MiB,
        which is then synced, so that a slow disk differs from one that hangs.

        Raises:
            OSError: not all could be written.
        """
        if not self._file.tensors:
            return ()
        name, sources = _name_of(self._rank), self._tensors if copies is None else copies
        # Data that is larger than the writer's buffer reaches the file without a copy.
        with io.BufferedWriter(_PiecewiseFile(self._folder / name, between)) as file:
            file.write(self._file.start)
            for stored in self._file.tensors:
                file.write(_bytes_of(_in_order(sources[stored.name])))
            file.flush()
            os.fsync(file.fileno())
        return (name,)

    def finish(self, records: Sequence[Sequence[FileRecord]]) -> None:
        """Writes the index of all tensors, after it has compared the files of all ranks with the plan.

        `records`: for each rank the records of the files that it has written.

        Only the first rank calls it.

        Raises:
            CheckpointError: a rank has written other files than planned.
            OSError: the index cannot be written.
        """
        for rank, (plan, found) in enumerate(zip(self._files, records, strict=True)):
            # A rank with another version of the package would have planned another file.
            expected = [(_name_of(rank), plan.size)] if plan.tensors else []
            if [(record.name, record.size) for record in found] != expected:
                raise CheckpointError(
                    f"rank {rank} has written other files than planned; check that all ranks run the same version of "
                    "diffusionpipe"
                )
        table = rows_of(StoredTensor).write(tuple(stored for plan in self._files for stored in plan.tensors))
        write_durably(self._folder / INDEX, (json.dumps(table, separators=(",", ":")) + "\n").encode("ascii"))


class _PiecewiseFile(io.FileIO):
    """A new file that is written in pieces.

    With `between` it is synced after each piece, and `between` is called after each write.
    """

    def __init__(self, path: Path, between: Callable[[], None] | None) -> None:
        super().__init__(path, "w")
        self._between, self._unsynced = between, 0

    def write(self, data: "ReadableBuffer") -> int:
        """Writes at most one piece of the data, and returns the number of bytes written."""
        written = super().write(memoryview(data)[:_PIECE])  # the writer calls again with the rest
        if self._between is not None:
            self._unsynced += written
            if self._unsynced >= _PIECE:
                os.fdatasync(self.fileno())
                self._unsynced = 0
            self._between()
        return written


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the tensors in place with the values that the folder holds under their names.

    Raises:
        CheckpointError: a name is missing, has another shape or type there, or the files cannot be read.
    """
    table = {stored.name: stored for stored in _table(folder)}
    _check_wanted(folder, tensors, table)
    fill = read_distcp_tensor if _is_distcp(folder) else _fill
    # In the order of the files, so that a disk reads forwards.
    places = sorted((table[name] for name in tensors), key=attrgetter("file", "offset"))
    try:
        for file, of_file in groupby(places, key=attrgetter("file")):
            with (folder / file).open("rb") as opened:
                for stored in of_file:
                    opened.seek(stored.offset)
                    fill(opened, stored, tensors[stored.name].detach())
    except Exception as error:  # a table that does not fit the files leads to anything
        raise CheckpointError(
            f"the tensors of {folder.name} cannot be read: {type(error).__name__}: {error}"
        ) from error


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the folder by name, as an empty tensor on the meta device with its shape and type.

    Raises:
        CheckpointError: the folder's table of tensors is missing or cannot be read.
    """
    table = _table(folder)
    try:
        return {stored.name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta") for stored in table}
    except (RuntimeError, TypeError) as error:  # no computer has room for such a shape
        raise CheckpointError(f"the table of tensors of {folder.name} cannot be used: {error}") from error


def _is_distcp(folder: Path) -> bool:
    """Whether the folder has the files of torch.distributed.checkpoint."""
    return not (folder / INDEX).exists() and (folder / METADATA).exists()


def _table(folder: Path) -> tuple[StoredTensor, ...]:
    """The index of the tensors in a folder of either format."""
    if _is_distcp(folder):
        return read_distcp_table(folder)
    try:
        table = rows_of(StoredTensor).read(read_json(folder / INDEX))
    except FileNotFoundError as error:
        raise CheckpointError(f"{INDEX} of {folder.name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{INDEX} of {folder.name} cannot be read: {error}") from error
    for stored in table:
        if problem := _problem_of(stored):
            raise CheckpointError(f"{INDEX} of {folder.name} cannot be used: {problem}")
    return table


def _problem_of(stored: StoredTensor) -> str | None:
    """The fault of one tensor's entry in the index, which a stranger may have written; None if it has none."""
    if stored.dtype not in DTYPES or any(size < 0 for size in stored.shape):
        return f"{stored.name!r}: there is no tensor of type {stored.dtype} and shape {stored.shape}"
    if not _FILE.fullmatch(stored.file):
        return f"{stored.file!r} is not one of the checkpoint's files"
    size = prod(stored.shape) * DTYPES[stored.dtype].itemsize
    if stored.offset < 0 or stored.length != size:
        return f"{stored.name!r} does not take {stored.length} bytes from byte {stored.offset} on"
    return None


def _check_wanted(folder: Path, tensors: Mapping[str, Tensor], table: Mapping[str, StoredTensor]) -> None:
    """Refuses tensors whose name, shape or type differs from the folder's table of tensors.

    Raises:
        CheckpointError: names up to ten of them.
    """
    missing = [name for name in tensors if name not in table]
    problems = [f"{folder.name} has no tensors {_some(missing)}"] if missing else []
    for name in tensors.keys() - set(missing):
        stored, wanted = (
            (table[name].shape, DTYPES[table[name].dtype]),
            (tuple(tensors[name].shape), tensors[name].dtype),
        )
        if stored != wanted:
            problems.append(f"{name} is {stored} in {folder.name}, but {wanted} here")
    if problems:
        raise CheckpointError(
            "\n".join([*problems[:10], *(["..."] if len(problems) > 10 else [])])
            + "\nthe checkpoint belongs to another model or recipe; resume with the recipe that wrote it"
        )


def _some(names: list[str], most: int = 20) -> str:
    """A text of at most `most` of the names, sorted, and the number of the others."""
    return ", ".join(sorted(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _fill(file: io.BufferedReader, stored: StoredTensor, tensor: Tensor) -> None:
    """Fills `tensor` with the values from the file's position on.

    Raises:
        ValueError: the file ends before the tensor does.
    """
    target = (
        tensor
        if tensor.device.type == "cpu" and _is_in_order(tensor)
        else torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    )
    if file.readinto(_bytes_of(target)) != stored.length:
        raise ValueError(f"{stored.file} ends within {stored.name}")
    if target is not tensor:
        tensor.copy_(target)


def _name_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def _file_of(rank: int, offers: Sequence[Offer], share: Sequence[int]) -> FilePlan:
    return file_plan(_name_of(rank), [offers[position] for position in share])


def _is_in_order(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values, in the order of its indices and without gaps."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor in host memory, contiguous; a copy only where it is not so already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data

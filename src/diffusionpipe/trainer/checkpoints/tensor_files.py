"""Named tensors of all ranks to and from a folder, in the format of torch.distributed.checkpoint.

We drive its planner and its file writer step by step instead of calling its `save` and `load`: the steps are the same,
but we learn which files each rank wrote, agree on failures in our own words, need no process group for one process, and
can read the metadata, which it pickles, without running what a pickle may contain.
"""

import io
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.output_file import check_folder
from diffusionpipe.runtime.comm.exchange import collect, form_of, rows_of
from diffusionpipe.runtime.job.agreement import agree, rank_in, size_of, together
from diffusionpipe.trainer.checkpoints.tensor_plans import (
    Offer,
    Written,
    check_replicas,
    offers_of,
    plan_of,
    results_of,
    share_of,
    shares_of,
    written_by,
)
from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

METADATA = ".metadata"
_PIECE: Bytes = 64 * 2**20
"""Bytes of a piece of a file that is written in pieces."""


class TensorWriting:
    """One rank's part of writing the tensors of all ranks into a folder, in steps that may be far apart.

    All ranks of the group take the steps in this order. They take `plan` together, through messages; a rank takes
    `write` and `finish` by itself, and another thread may do it.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """`folder` exists and is empty."""
        self._folder, self._group = folder, group
        self._rank = rank_in(group)
        # One thread: an error in any but the first of the writer's threads would be lost.
        self._writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._share = SavePlan([])
        self._decided: tuple[list[SavePlan], Metadata] | None = None

    def plan(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Agrees on who writes what, and returns the names of the tensors that this rank writes.

        A name that several ranks hold is written by one of them, so that all write about equally much.

        Raises:
            CheckpointError: on all ranks; a tensor is not dense, or ranks hold different shapes or types under one
                name.
        """
        is_first = self._rank == 0

        def plan_own() -> tuple[SavePlan, tuple[Offer, ...]]:
            self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), is_first)
            self._writer.set_up_storage_writer(is_first)
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
            return plan, offers_of(plan)

        own, own_offers = together(plan_own, self._group)
        sent_offers = collect(own_offers, rows_of(Offer), self._group)

        def plan_all() -> tuple[tuple[int, ...], ...]:
            if not is_first:
                return ()
            offers = [read() for read in sent_offers]
            check_replicas(offers)
            self._decided = self._planner.create_global_plan([plan_of(of_rank) for of_rank in offers])
            return shares_of(offers, self._decided[0])

        shares = agree(plan_all, self._group, form=form_of(tuple[tuple[int, ...], ...]))[0]
        # The writer names the files of a plan by its place among all.
        places = [SavePlan([]) for _ in range(size_of(self._group))]
        places[self._rank] = share_of(own, shares[self._rank])
        self._share = self._planner.finish_plan(self._writer.prepare_global_plan(places)[self._rank])
        return tuple(item.index.fqn for item in self._share.items)

    def write(
        self, copies: Mapping[str, Tensor] | None = None, between: Callable[[], None] | None = None
    ) -> tuple[Written, ...]:
        """Writes this rank's tensors, or their copies in host memory, to the disk.

        Returns each one's file, offset and size. `between` is called after every piece of at most 64 MiB, which is then
        synced, so that a slow disk differs from one that hangs.

        Raises:
            CheckpointError: not all could be written.
        """
        if not self._share.items:  # torch's writer would leave an empty file, which no manifest names
            return ()
        if copies is not None:
            self._planner.state_dict = dict(copies)
            self._writer.per_thread_copy_ahead = 0  # nothing to copy: no stream of a GPU is used
        if between is not None:
            self._writer.fs = _PiecewiseFiles(between)
        try:
            written: list[WriteResult] = self._writer.write_data(self._share, self._planner).wait()
        except RuntimeError as error:  # torch's writer speaks of positions in the file where the disk is full
            check_folder(self._folder)
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        if len(written) != len(self._share.items):
            raise CheckpointError(f"only {len(written)} of {len(self._share.items)} tensors were written")
        return written_by(written)

    def finish(self, written: Sequence[Sequence[Written]]) -> None:
        """Writes the table of all tensors from the ranks' results `written`, in the order of ranks.

        Raises:
            CheckpointError: a rank has written something else than it was to write.
            AssertionError: this is not the first rank.
        """
        assert self._decided is not None, "only the first rank has planned for all"
        plans, metadata = self._decided
        of_ranks = zip(written, self._writer.prepare_global_plan(plans), strict=True)
        self._writer.finish(metadata, [results_of(rows, plan, plan.storage_data.prefix) for rows, plan in of_ranks])


class _PiecewiseFiles(FileSystem):
    """Files whose content goes to the disk piece by piece while they are written."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self._between = between

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to write to, whose content goes to the disk piece by piece."""
        with io.BufferedWriter(_PiecewiseFile(path, mode, self._between)) as stream:
            yield stream


class _PiecewiseFile(io.FileIO):
    """A file that is synced whenever a piece was written."""

    def __init__(self, path: str | os.PathLike[str], mode: str, between: Callable[[], None]) -> None:
        super().__init__(os.fspath(path), mode)
        self._between, self._unsynced = between, 0

    def write(self, data: "ReadableBuffer") -> int:
        """Write up to a piece of the data, and sync the file after each whole piece; the number of bytes written."""
        written = super().write(memoryview(data)[:_PIECE])
        self._unsynced += written
        if self._unsynced >= _PIECE:
            os.fdatasync(self.fileno())
            self._unsynced = 0
        self._between()
        return written


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the tensors in place with the values that the folder has under their names, written by any rank.

    Raises:
        CheckpointError: a name is missing, has another shape or type there, or the files cannot be read.
    """
    metadata = _read_metadata(folder)
    _check_wanted(folder, tensors, metadata)
    reader = FileSystemReader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        reader.set_up_storage_reader(metadata, True)
        planner.set_up_planner(dict(tensors), metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:  # a table that does not fit the files leads to anything
        raise CheckpointError(
            f"the tensors of {folder.name} cannot be read: {type(error).__name__}: {error}"
        ) from error


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the folder by name, as an empty tensor on the meta device with its shape and type.

    Raises:
        CheckpointError: the folder's table of tensors is missing or cannot be read.
    """
    return {
        name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in _read_metadata(folder).state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def _check_wanted(folder: Path, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Compares names, shapes and types; DCP itself would convert types silently."""
    missing = [name for name in tensors if name not in metadata.state_dict_metadata]
    problems = [f"{folder.name} has no tensors {_some(missing)}"] if missing else []
    for name in tensors.keys() - set(missing):
        item, tensor = metadata.state_dict_metadata[name], tensors[name]
        stored = (tuple(item.size), item.properties.dtype) if isinstance(item, TensorStorageMetadata) else "no tensor"
        if stored != (tuple(tensor.shape), tensor.dtype):
            problems.append(f"{name} is {stored} in {folder.name}, but {(tuple(tensor.shape), tensor.dtype)} here")
    if problems:
        raise CheckpointError(
            "\n".join([*problems[:10], *(["..."] if len(problems) > 10 else [])])
            + "\nthe checkpoint belongs to another model or recipe; resume with the recipe that wrote it"
        )


def _some(names: list[str], most: int = 20) -> str:
    """The names in order, cut after `most`."""
    return ", ".join(sorted(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else: a pickle from a stranger's checkpoint must not run code."""

    def find_class(self, module: str, name: str) -> object:
        """The class, if metadata may contain it."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath")
        if is_path:
            return pathlib.PurePath
        if is_dtype or f"{module}.{name}" in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


_METADATA_CLASSES = frozenset(
    {
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


def _read_metadata(folder: Path) -> Metadata:
    """DCP's table of what lies where."""
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{METADATA} of {folder.name} is missing") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{METADATA} of {folder.name} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{METADATA} of {folder.name} holds a {type(metadata).__name__}")
    if problem := _problem_of(metadata):
        raise CheckpointError(f"{METADATA} of {folder.name} cannot be used: {problem}")
    return metadata


def _is_whole(item: TensorStorageMetadata) -> bool:
    """Whether shape and type of a tensor in the table are valid."""
    dtype = getattr(item.properties, "dtype", None)
    return isinstance(item.size, torch.Size) and isinstance(item.chunks, list) and isinstance(dtype, torch.dtype)


def _problem_of(metadata: Metadata) -> str | None:
    """The fault that makes a table unfit to be read by torch, which trusts it."""
    items, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(items, dict) or not isinstance(places, dict):
        return "it is incomplete"
    for name, item in items.items():
        if not isinstance(name, str) or (isinstance(item, TensorStorageMetadata) and not _is_whole(item)):
            return f"it does not describe {name!r} as a tensor"
    for place in places.values():
        if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
            return "it does not say where each tensor lies"
        if not place.relative_path.endswith(".distcp") or "/" in place.relative_path:
            return f"{place.relative_path!r} is not one of the checkpoint's files"
        if getattr(place, "transform_descriptors", None):
            return f"{place.relative_path} is compressed or encrypted, which DiffusionPipe does not do"
    return None

"""Named tensors of all ranks to and from a folder, in the format of torch.distributed.checkpoint.

We drive its planner and its file writer step by step instead of calling its `save` and `load`: the steps are the same,
but we learn which files each rank wrote, agree on failures in our own words, need no process group for one process, and
can read the metadata, which it pickles, without running what a pickle may contain.
"""

import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from diffusionpipe.errors import CheckpointError
from diffusionpipe.ir.output_file import check_folder
from diffusionpipe.runtime.exchange import collect, form_of, rows_of
from diffusionpipe.trainer.agreement import agree, rank_in, size_of, together
from diffusionpipe.trainer.tensor_plans import (
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

METADATA = ".metadata"


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> tuple[str, ...]:
    """Writes every rank's tensors into the existing, empty folder; returns the names of the files this rank wrote.

    A name that several ranks hold is written by one of them, so that all write about equally much.

    Raises:
        CheckpointError: a rank could not write, or two ranks mean different things by one name.
    """
    rank = rank_in(group)
    is_first = rank == 0
    # One thread: an error in any but the first of the writer's threads would be lost.
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_own() -> tuple[SavePlan, tuple[Offer, ...]]:
        planner.set_up_planner(dict(tensors), writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        return plan, offers_of(plan)

    own, own_offers = together(plan_own, group)
    sent_offers = collect(own_offers, rows_of(Offer), group)
    decided: tuple[list[SavePlan], Metadata] | None = None

    def plan_all() -> tuple[tuple[int, ...], ...]:
        nonlocal decided
        if not is_first:
            return ()
        offers = [read() for read in sent_offers]
        check_replicas(offers)
        decided = planner.create_global_plan([plan_of(of_rank) for of_rank in offers])
        return shares_of(offers, decided[0])

    shares = agree(plan_all, group, form=form_of(tuple[tuple[int, ...], ...]))[0]

    def write_own() -> tuple[Written, ...]:
        # The writer names the files of a plan by its place among all.
        places = [SavePlan([]) for _ in range(size_of(group))]
        places[rank] = share_of(own, shares[rank])
        share = planner.finish_plan(writer.prepare_global_plan(places)[rank])
        try:
            written: list[WriteResult] = writer.write_data(share, planner).wait()
        except RuntimeError as error:  # torch's writer speaks of positions in the file where the disk is full
            check_folder(folder)
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        if len(written) != len(share.items):
            raise CheckpointError(f"only {len(written)} of {len(share.items)} tensors were written")
        return written_by(written)

    own_results = together(write_own, group)
    sent_results = collect(own_results, rows_of(Written), group)

    def finish() -> None:
        if decided is None:
            return
        plans, metadata = decided
        of_ranks = zip(sent_results, writer.prepare_global_plan(plans), strict=True)
        writer.finish(metadata, [results_of(read(), plan, plan.storage_data.prefix) for read, plan in of_ranks])

    together(finish, group)
    names = {one.file for one in own_results}
    return (*sorted(names), *((METADATA,) if is_first else ()))


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the tensors in place with what the folder has under their names; any process may read any of them.

    Raises:
        CheckpointError: a name is missing, or has another shape or type there.
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
    """Every tensor in the folder by name, as an empty tensor on the meta device with its shape and type."""
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
    """Whether shape and type of a tensor in the table are what they should be."""
    dtype = getattr(item.properties, "dtype", None)
    return isinstance(item.size, torch.Size) and isinstance(item.chunks, list) and isinstance(dtype, torch.dtype)


def _problem_of(metadata: Metadata) -> str | None:
    """What makes a table unfit to be read by torch, which trusts it."""
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

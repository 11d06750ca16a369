"""The messages between ranks while they write a checkpoint, in JSON: their tensors, who writes which, and where.

torch.distributed.checkpoint sends its plans and results as pickles. Ours are plans of whole tensors alone, so a name, a
shape and a type say all about an item, and each rank builds the rest itself as DCP does. The first rank believes the
others only what it can check: a rank may report the tensors that it was to write, in files of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.comm.exchange import JsonForm, rows_of
from diffusionpipe.trainer.checkpoints.manifest import FileRecord
from diffusionpipe.units import Bytes

_DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Name, type and shape of a tensor that a rank holds and could write."""

    name: str
    dtype: str
    """The type of the tensor without "torch.", e.g. "float32"."""
    shape: tuple[int, ...]
    requires_grad: bool
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The place and the size in bytes of a tensor that a rank has written: file, offset, length."""

    name: str
    file: str
    offset: Bytes
    length: Bytes
    """Bytes that the tensor takes in the file."""
    size: Bytes
    """Bytes of the tensor as DCP counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The tensors that one rank has written for a checkpoint, and the size and checksum of each of its files."""

    written: tuple[Written, ...]
    records: tuple[FileRecord, ...]
    """The records of its files."""


def _part_form() -> JsonForm[RankFiles]:
    written, records = rows_of(Written), rows_of(FileRecord)

    def read(data: object) -> RankFiles:
        if not isinstance(data, list) or len(data) != 2:
            raise ValueError("the tensors and the files of a rank are needed")
        return RankFiles(written=written.read(data[0]), records=records.read(data[1]))

    return JsonForm(lambda part: [written.write(part.written), records.write(part.records)], read)


PART = _part_form()
"""The form in which a part travels between ranks."""


def offers_of(plan: SavePlan) -> tuple[Offer, ...]:
    """The tensors of a rank's save plan, in its order.

    Raises:
        CheckpointError: an item is not a whole, dense tensor.
    """
    return tuple(map(_offer, plan.items))


def _offer(item: WriteItem) -> Offer:
    data = item.tensor_data
    if data is None or item.type is not WriteItemType.TENSOR or data.properties.layout is not torch.strided:
        raise CheckpointError(f"{item.index.fqn} is not a dense tensor")
    return Offer(
        name=item.index.fqn,
        dtype=str(data.properties.dtype).removeprefix("torch."),
        shape=tuple(data.size),
        requires_grad=data.properties.requires_grad,
        is_pinned=data.properties.pin_memory,
    )


def plan_of(offers: Sequence[Offer]) -> SavePlan:
    """A save plan of torch with these tensors as its items, the inverse of `offers_of`.

    Raises:
        CheckpointError: there is no tensor of such a type or shape.
    """
    return SavePlan([_item(offer) for offer in offers])


def _item(offer: Offer) -> WriteItem:
    if offer.dtype not in _DTYPES or any(size < 0 for size in offer.shape):
        raise CheckpointError(f"{offer.name}: there is no tensor of type {offer.dtype} and shape {offer.shape}")
    size = torch.Size(offer.shape)
    offsets = torch.Size([0] * len(size))
    properties = TensorProperties(
        dtype=_DTYPES[offer.dtype], requires_grad=offer.requires_grad, pin_memory=offer.is_pinned
    )
    return WriteItem(
        index=MetadataIndex(offer.name, offsets),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=size), properties=properties, size=size
        ),
    )


def shares_of(offers: Sequence[Sequence[Offer]], decided: Sequence[SavePlan]) -> tuple[tuple[int, ...], ...]:
    """For each rank the positions, among its own offers, of the tensors that its `decided` plan writes, in order."""
    positions = [{offer.name: position for position, offer in enumerate(of_rank)} for of_rank in offers]
    return tuple(
        tuple(known[item.index.fqn] for item in plan.items) for known, plan in zip(positions, decided, strict=True)
    )


def share_of(own: SavePlan, positions: Sequence[int]) -> SavePlan:
    """The plan `own` with only the items at these positions, each marked as the first and only chunk of its tensor."""
    items = [own.items[position] for position in positions]
    return replace(own, items=[replace(item, index=replace(item.index, index=0)) for item in items])


def written_by(results: Sequence[WriteResult]) -> tuple[Written, ...]:
    """Name, file, offset and sizes of each tensor in the results of torch's writer."""
    return tuple(
        Written(
            name=result.index.fqn,
            file=result.storage_data.relative_path,
            offset=result.storage_data.offset,
            length=result.storage_data.length,
            size=result.size_in_bytes,
        )
        for result in results
    )


def results_of(written: Sequence[Written], share: SavePlan, prefix: str) -> list[WriteResult]:
    """The results of torch's writer that `written` was made from, for a rank whose files begin with `prefix`.

    Raises:
        CheckpointError: the names differ from the names of its `share`, or a file is not one of the rank's.
    """
    index_of = {item.index.fqn: item.index for item in share.items}
    if sorted(one.name for one in written) != sorted(index_of):
        raise CheckpointError(
            f"the rank that writes {prefix}* has written other tensors than planned; check that all ranks run the same "
            "version of diffusionpipe"
        )
    for one in written:
        if not one.file.startswith(prefix) or "/" in one.file or min(one.offset, one.length, one.size) < 0:
            raise CheckpointError(f"{one.name} cannot lie in {one.file!r}; its file is one of {prefix}*")
    return [
        WriteResult(
            index=index_of[one.name],
            size_in_bytes=one.size,
            storage_data=_StorageInfo(one.file, one.offset, one.length),
        )
        for one in written
    ]


def check_replicas(offers: Sequence[Sequence[Offer]]) -> None:
    """Refuses a name under which ranks hold tensors of different shapes or types; `offers` are by rank.

    Raises:
        CheckpointError: names the tensor and both ranks.
    """
    seen: dict[str, tuple[int, object]] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            kind = (offer.shape, offer.dtype)
            first, known = seen.setdefault(offer.name, (rank, kind))
            if known != kind:
                raise CheckpointError(f"{offer.name} is {known} on rank {first} and {kind} on rank {rank}")

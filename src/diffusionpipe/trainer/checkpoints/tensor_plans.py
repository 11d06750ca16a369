"""Plans of a checkpoint's files: the rank that writes each tensor, and the tensor's place in that rank's file.

Every rank offers its tensors by name, type and shape, and the first rank chooses. A rank's file is one of safetensors:

    8 bytes: length of the header | header in JSON, filled with blanks | values of the tensors, without gaps

It follows from names, types and shapes alone, so the first rank can say where everything lies before it is written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.units import Bytes

DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""All types of torch, keyed by their names without "torch."."""
_IN_FILE: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""The names of types in a header, by torch's names; a tensor of another type is stored as bytes ("U8")."""
_ALIGNMENT: Bytes = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Name, type and shape of a tensor that a rank holds and could write."""

    name: str
    dtype: str
    """The type of the tensor without "torch.", e.g. "float32"."""
    shape: tuple[int, ...]

    @property
    def size(self) -> Bytes:
        """The number of bytes that the tensor takes in a file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The place, type and shape of a tensor in a checkpoint: one entry of the index."""

    name: str
    file: str
    """The name of the file in the checkpoint's folder."""
    offset: Bytes
    """The position of the tensor's first byte in the file."""
    length: Bytes
    """The number of bytes that the tensor takes in the file."""
    dtype: str
    """The type of the tensor without "torch.", e.g. "float32"."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """The file that one rank will write: its first bytes, and where each tensor lies."""

    start: bytes
    """The first bytes of the file: the length of the header, and the header."""
    tensors: tuple[StoredTensor, ...]
    """The tensors of the file, in its order."""
    size: Bytes
    """The length of the whole file in bytes."""


def offer_of(name: str, tensor: Tensor) -> Offer:
    """The name, type and shape of a tensor, as a rank offers it to the first rank.

    Raises:
        CheckpointError: the tensor is sparse or quantised.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is not a dense tensor")
    return Offer(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def check_offers(offers: Sequence[Sequence[Offer]]) -> None:
    """Refuses an impossible type or shape, and a name with different shapes or types on two ranks.

    `offers`: the offers of each rank.

    Raises:
        CheckpointError: names the tensor, and both ranks if they differ.
    """
    seen: dict[str, tuple[int, object]] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            if offer.dtype not in DTYPES or any(size < 0 for size in offer.shape):
                raise CheckpointError(f"{offer.name}: there is no tensor of type {offer.dtype} and shape {offer.shape}")
            kind = (offer.shape, offer.dtype)
            first, known = seen.setdefault(offer.name, (rank, kind))
            if known != kind:
                raise CheckpointError(f"{offer.name} is {known} on rank {first} and {kind} on rank {rank}")


def shares_of(offers: Sequence[Sequence[Offer]]) -> tuple[tuple[int, ...], ...]:
    """For each rank the positions, among its own offers, of the tensors that it is to write.

    `offers`: the offers of each rank.

    Each name is written once. Where several ranks hold a name, the one with the fewest bytes so far writes it; large
    tensors are given away first (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, Bytes] = {}
    for rank, of_rank in enumerate(offers):
        for position, offer in enumerate(of_rank):
            holders.setdefault(offer.name, []).append((rank, position))
            sizes[offer.name] = offer.size
    written: list[Bytes] = [0] * len(offers)
    shares: list[list[int]] = [[] for _ in offers]
    # Names with one holder leave no choice, so they come first and count in the loads.
    for name in sorted(holders, key=lambda name: (len(holders[name]) > 1, -sizes[name])):
        rank, position = min(holders[name], key=lambda held: written[held[0]])
        written[rank] += sizes[name]
        shares[rank].append(position)
    return tuple(tuple(sorted(share)) for share in shares)


def file_plan(file: str, offers: Sequence[Offer]) -> FilePlan:
    """The plan of the file with this name and these tensors.

    Wide types come first, so that each tensor begins at a multiple of its type's width.
    """
    ordered = sorted(offers, key=lambda offer: -DTYPES[offer.dtype].itemsize)
    ends = list(accumulate((offer.size for offer in ordered), initial=0))
    # As safetensors writes for torch; some readers refuse files without it.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for offer, begin, end in zip(ordered, ends, ends[1:], strict=False):
        dtype = _IN_FILE.get(offer.dtype)
        kind = {"dtype": dtype, "shape": offer.shape} if dtype else {"dtype": "U8", "shape": [offer.size]}
        header[offer.name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    # The values begin at a multiple of 8 bytes; so each tensor begins at a multiple of its width.
    text += b" " * (-len(text) % _ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    tensors = tuple(
        StoredTensor(
            name=offer.name,
            file=file,
            offset=len(start) + begin,
            length=offer.size,
            dtype=offer.dtype,
            shape=offer.shape,
        )
        for offer, begin in zip(ordered, ends, strict=False)
    )
    return FilePlan(start=start, tensors=tensors, size=len(start) + ends[-1])

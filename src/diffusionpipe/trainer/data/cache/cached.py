"""The tensors of frozen layers that a batch takes from a cache, and their keys.

A key follows from content alone: the bytes of the picture's file, its cut, mirror and size, and the tokens of a text.
So a picture that is replaced, a caption that is changed, or another size has another key, and a text that several
pictures share has one. Weights, precision and all other settings have a folder of their own (`files`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.trainer.data.cache.files import row_bytes, shards_of
from diffusionpipe.trainer.data.content import Content, bytes_of

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""A placeholder for the key of a row whose tensor is neither read from the cache nor written."""
_BLOCK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTensor:
    """A tensor of frozen layers that a cache keeps: its shape, the raw inputs it follows from, and its folder."""

    spec: TensorSpec
    """The shape of the tensor for one sample, and its dtype."""
    reads: tuple[str, ...]
    """The names of the raw inputs from which the tensor follows."""
    folder: Path
    """The folder with the files of its values."""
    left_out: frozenset[int] = frozenset()
    """The indices of sources whose samples differ each time, so nothing of them is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPart:
    """All tensors that a cache keeps for one size of samples."""

    tensors: tuple[CachedTensor, ...]
    spared: frozenset[str]
    """The names of raw inputs that nothing reads if the cache has every tensor that follows from them."""

    def is_spared(self, name: str, given: Sequence[bool]) -> bool:
        """Whether a row needs no value of the raw input `name`: the cache has each tensor that follows from it.

        `given`: whether the cache has each of `tensors` for the row.
        """
        return name in self.spared and all(
            is_given for tensor, is_given in zip(self.tensors, given, strict=True) if name in tensor.reads
        )


def key_of(parts: Sequence[bytes], spec: TensorSpec) -> bytes:
    """The 16-byte key of a cached tensor.

    `parts`: the contents of the raw inputs from which it follows.

    The key is a digest of the tensor's shape and of these contents.
    """
    digest = blake2b(repr(spec.shape).encode(), digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))  # else the end of one part could be the start of the next
        digest.update(part)
    return digest.digest()


def picture_content(content: Content, about: object) -> bytes:
    """Bytes that identify a picture or clip and its view: a digest of the file, followed by `about` as text.

    `about`: the way in which the picture or clip is seen.
    """
    return _file_digest(content, _date(content)) + repr(about).encode()


def token_content(row: Tensor) -> bytes:
    """The bytes of one sample's tokens, or of their mask."""
    return row_bytes(row)


def found_rows(tensor: CachedTensor, keys: Sequence[bytes]) -> tuple[Tensor, list[bool]]:
    """The cached values of these keys, (len(keys), *shape), zeros where there is none, and whether each was found."""
    spec, shards = tensor.spec, shards_of(tensor.folder)
    dtype = getattr(torch, spec.dtype)
    rows, given = torch.zeros(len(keys), *spec.shape, dtype=dtype), [False] * len(keys)
    for row, key in enumerate(keys):
        found = shards.read(key.hex()) if key != NO_KEY else None
        # A file of another program may hold anything.
        if found is not None and found.shape == spec.shape and found.dtype is dtype:
            rows[row], given[row] = found, True
    return rows, given


def _date(content: Content) -> tuple[int, int]:
    """The size in bytes and the date of a file, by which a replaced file is noticed; (0, 0) in tar files and tables."""
    if not isinstance(content, Path):
        return 0, 0  # tar files and tables do not change while a run lasts
    about = content.stat()
    return about.st_size, about.st_mtime_ns


@lru_cache(maxsize=2**17)
def _file_digest(content: Content, date: tuple[int, int]) -> bytes:
    """A digest of all bytes of a picture's or clip's file.

    `date`: the size and date of the file; a file with another date is read again.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    if not isinstance(content, Path):
        digest.update(bytes_of(content))
        return digest.digest()
    with content.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()

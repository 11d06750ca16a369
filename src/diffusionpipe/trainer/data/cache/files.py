"""Tensors by key in a folder of safetensors files: a cache's files.

    cache/latents-moments-3f0c91a2b7de/settings.json                 the settings for which they are true, in words
                                       5b1e....safetensors           a shard: key of 32 hexadecimal digits -> tensor
                                       a07c....safetensors

A shard is whole or not there, and is never changed. So any number of processes and runs may write into one folder, and
a writer that is killed leaves all its shards but the last. A shard is named by its keys, so the same tensors always
have the same file. Its header has a checksum of each tensor, which is compared whenever the tensor is read. A damaged
shard is removed, so that its results are written again.
"""

import json
import logging
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.units import Bytes, Seconds

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
_TICK: Seconds = 1.0
"""The seconds within which a folder's date may stay the same though files have been added."""
_OLD: Seconds = 24 * 3600.0
"""The age of a draft, in seconds, from which on its writer counts as gone."""


class CacheFiles:
    """The tensors in a cache folder's safetensors files, by key; it also finds files that other processes add."""

    def __init__(self, folder: Path) -> None:
        """Takes the path of the folder, which may not exist yet; reads nothing."""
        self._folder = folder
        self._shard_of: dict[str, Path] = {}
        self._sums: dict[str, str] = {}
        self._seen: set[str] = set()
        self._dated = -1.0
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._shard_of)

    def has(self, key: str) -> bool:
        """Whether the folder has a tensor with this key; looks for new files if the folder's date has changed."""
        if key not in self._shard_of:
            self.look()
        return key in self._shard_of

    def holds(self, key: str) -> bool:
        """Whether the folder has a tensor with this key, and its file still exists."""
        return self.has(key) and self._shard_of[key].exists()

    def look(self) -> None:
        """Reads the keys of files that have been added, if the folder's date has changed."""
        with suppress(OSError):
            dated = self._folder.stat().st_mtime
            if dated == self._dated and self._looked > dated + _TICK:
                return
            self._dated, self._looked = dated, time.time()
            for path in sorted(self._folder.glob("*.safetensors")):
                if path.name not in self._seen:
                    self._learn(path)

    def read(self, key: str) -> Tensor | None:
        """The tensor with this key; None if there is none, or if its file is gone or damaged, which is logged."""
        if not self.has(key):
            return None
        path = self._shard_of[key]
        try:
            # Opened for each tensor: a large cache has more shards than a process may have open files.
            with safe_open(path, framework="pt") as shard:
                found: Tensor = shard.get_tensor(key)
            if _checksum(found) != self._sums.get(key):
                raise SafetensorError("its bytes differ from their checksum")
        except (OSError, SafetensorError) as error:
            self._forget(path, error)
            return None
        return found

    def _learn(self, path: Path) -> None:
        self._seen.add(path.name)
        try:
            with safe_open(path, framework="pt") as shard:  # reads the header only
                self._shard_of |= dict.fromkeys(shard.keys(), path)
                self._sums |= shard.metadata() or {}
        except (OSError, SafetensorError) as error:
            self._forget(path, error)

    def _forget(self, path: Path, error: Exception) -> None:
        logger.warning('cache=%s reason="%s; its results are computed again"', path, error)
        if isinstance(error, SafetensorError):
            path.unlink(missing_ok=True)  # writers, which read no tensor, see then that its results are missing
        self._shard_of = {key: own for key, own in self._shard_of.items() if own != path}
        if not path.exists():
            self._seen.discard(path.name)  # another writer, or this one, may write the same results again


@lru_cache(maxsize=64)
def shards_of(folder: Path) -> CacheFiles:
    """The tensors in a cache folder, as one object for all callers in this process."""
    return CacheFiles(folder)


def write_shard(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Writes tensors into the folder as one file and returns its path, which follows from the keys.

    `tensors`: tensors in host memory, by key.

    Raises:
        ConfigError: the file cannot be written; nothing is left of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = blake2b(" ".join(sorted(tensors)).encode(), digest_size=16).hexdigest()
    path = folder / f"{name}.safetensors"
    # One order, so that equal tensors give an equal file.
    rows = {key: tensor.contiguous() for key, tensor in sorted(tensors.items())}
    write_atomically(path, save(rows, metadata={key: _checksum(row) for key, row in rows.items()}))
    return path


def write_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Writes settings.json into a cache folder if it has none, and removes drafts that are older than a day.

    Raises:
        ConfigError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for draft in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > _OLD:
                draft.unlink()
    if not (folder / SETTINGS).exists():
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def existing(folder: Path) -> Path:
    """The folder itself if it exists, or else the nearest folder above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def num_bytes(folder: Path) -> Bytes:
    """The size in bytes of all .safetensors files directly in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _checksum(row: Tensor) -> str:
    """A checksum of a tensor's bytes, in hexadecimal digits."""
    return f"{zlib.crc32(row_bytes(row)):08x}"


def row_bytes(row: Tensor) -> bytes:
    """The bytes of a tensor in host memory, of any dtype."""
    return row.contiguous().flatten().view(torch.uint8).numpy().tobytes()

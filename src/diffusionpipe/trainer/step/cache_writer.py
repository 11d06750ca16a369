"""Writes results of encoders that the cache lacked into it while training continues."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic

from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Range
from diffusionpipe.runtime.compute.runs import GIVEN, KEYS, runs_of
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.trainer.data.cache.cached import NO_KEY, CachedTensor
from diffusionpipe.trainer.data.cache.files import CacheFiles, write_shard
from diffusionpipe.units import Bytes, Seconds

logger = logging.getLogger(__name__)

SHARD: Bytes = 32 * 2**20
"""The number of bytes of results from which a shard, one file of results, is written."""
PATIENCE: Seconds = 10.0
"""The time after which a smaller shard is written too."""
_MOST_WAITING = 4
"""The most shards that may wait for the disk; with more, training waits."""


class CacheWriter:
    """Copies results of encoders from a rank's row store, and writes the missing ones to the cache in another thread.

    A full disk ends the writing with a warning, and training continues: missing results are computed in later epochs.
    """

    def __init__(self, tensors: Sequence[CachedTensor]) -> None:
        self._tensors = tuple(tensors)
        # One thread, so shards and `num_written` need no lock.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._waiting: list[Future[None]] = []
        self._known = {tensor.folder: CacheFiles(tensor.folder) for tensor in tensors}
        self._pending: dict[Path, dict[str, Tensor]] = {tensor.folder: {} for tensor in tensors}
        self._written: set[tuple[Path, str]] = set()
        self._since = monotonic()
        self._is_over = False
        self._fed: tuple[list[list[int]], list[list[bytes]]] = [], []
        self.num_read = 0
        """The number of results that came from the cache."""
        self.num_encoded = 0
        """The number of results that were computed."""
        self.num_written = 0
        """The number of results that this rank has written into shards."""

    def feed(self, batch: Mapping[str, Tensor]) -> None:
        """Notes for the batch that runs next which key each of its results has, and whether it came from the cache."""
        marks: list[list[int]] = []
        keys: list[list[bytes]] = []
        for part in runs_of(batch)[1]:
            if GIVEN in part:
                marks += part[GIVEN].tolist()
                keys += [[bytes(key) for key in row] for row in part[KEYS].numpy()]
        self._fed = marks, keys

    def take(self, store: RowStore, rows: Range | None) -> None:
        """Copies the missing results of the batch from its rows in the store; `rows` None: this rank encodes nothing.

        They are written once there are 32 MiB, or after 10 s.
        """
        if rows is None:
            return
        for row, marks, keys in zip(range(rows.start, rows.stop), *self._fed, strict=True):
            for tensor, is_given, key in zip(self._tensors, marks, keys, strict=True):
                self.num_read += is_given
                self.num_encoded += not is_given
                # NO_KEY marks a result that must not be kept.
                if is_given or key == NO_KEY or self._is_over:
                    continue
                own, name = self._pending[tensor.folder], key.hex()
                # The same sample may come twice in a batch, or again before its shard is on the disk.
                if (tensor.folder, name) in self._written or name in own:
                    continue
                # On a CPU `to` alone would give a view of the row, which the next batch overwrites.
                own[name] = store.view(tensor.spec.name, Range(row, row + 1))[0].detach().to("cpu", copy=True)
        size = sum(value.nbytes for own in self._pending.values() for value in own.values())
        if size >= SHARD or (size and monotonic() - self._since > PATIENCE):
            self.flush()

    def flush(self) -> None:
        """Hands all copied results to the thread that writes; waits if more than four shards are not yet written."""
        self._since = monotonic()
        for folder, own in self._pending.items():
            if own and not self._is_over:
                # They count as written from here on: a later batch must not copy them again.
                self._written |= {(folder, name) for name in own}
                self._waiting.append(self._pool.submit(self._write, folder, own))
            self._pending[folder] = {}
        # Results wait in host memory; a slow disk must not fill it.
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.pop(0).result()

    def settle(self) -> None:
        """Waits until all results that were handed to the thread are on the disk."""
        while self._waiting:
            self._waiting.pop(0).result()

    def close(self) -> None:
        """Writes all results that are not yet written, and ends the thread."""
        self.flush()
        self.settle()
        self._pool.shutdown()

    def counts(self) -> dict[str, int]:
        """The numbers of results so far on this rank: "num_encoded" (computed), "num_read" and "num_written"."""
        return {"num_encoded": self.num_encoded, "num_read": self.num_read, "num_written": self.num_written}

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a shard with the results, by key, that no other rank or run has written into the folder meanwhile."""
        if self._is_over:
            return
        known = self._known[folder]
        missing = {name: value for name, value in tensors.items() if not known.holds(name)}
        # Other ranks and runs write into the same folder.
        if not missing:
            return
        try:
            write_shard(folder, missing)
            self.num_written += len(missing)
        except (ConfigError, OSError) as error:
            self._is_over = True
            logger.warning(
                'cache=%s written=%d reason="%s; training continues without writing, and encodes what is missing"',
                folder,
                self.num_written,
                str(error).replace("\n", " "),
            )

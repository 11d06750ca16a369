"""Kills of a process at stated places of its writing: after so many bytes of a draft, or right after the rename."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from diffusionpipe.files import output_file

RENAMED = 2.0
"""In place of a share of bytes: the file has its name, which is not yet written to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The place of a kill: in the `number`-th file of a kind that a rank writes."""

    rank: int
    kind: str
    """The beginning of its path below the folder that is watched; "": every file."""
    share: float
    """The share of its bytes that its draft has; 1 is before the rename."""
    number: int = 1

    def arm(self, rank: int, folder: Path, mark: Path) -> None:
        """In this process: die there, in files below `folder`, and leave the file `mark` as a sign."""
        if rank == self.rank:
            drafts: list[Path] = []
            write, sync = output_file.write_durably, output_file.sync
            mock.patch.object(output_file, "write_durably", partial(self._write, write, folder, mark, drafts)).start()
            mock.patch.object(output_file, "sync", partial(self._sync, sync, mark, drafts)).start()

    def _write(
        self,
        write: Callable[[Path, bytes], None],
        folder: Path,
        mark: Path,
        drafts: list[Path],
        path: Path,
        data: bytes,
    ) -> None:
        if path.is_relative_to(folder) and str(path.relative_to(folder)).startswith(self.kind):
            drafts.append(path)
            if len(drafts) == self.number and self.share <= 1:
                write(path, data[: int(self.share * len(data))])
                _die(mark)
        write(path, data)

    def _sync(self, sync: Callable[[Path], None], mark: Path, drafts: list[Path], path: Path) -> None:
        """Names of a folder are written to the disk right after a rename in it."""
        if self.share == RENAMED and len(drafts) == self.number and path == drafts[-1].parent:
            _die(mark)
        sync(path)


def _die(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)

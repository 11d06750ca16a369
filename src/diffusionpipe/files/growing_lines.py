"""The lines of a file to which another process appends: each byte is read once."""

from __future__ import annotations

import os
from pathlib import Path

_CHECKED = 256
"""The number of bytes before the reached position that are compared; if they differ, the file was written again."""


class GrowingLines:
    """Reads the complete lines of a file as it grows. Mutable: it remembers the position up to which it has read.

    A file that was replaced, made shorter or written again is read from its start. A change in the middle, with the
    last bytes and the size as before, is not seen.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._tail = path, 0, b""
        self._file: tuple[int, int] | None = None
        self.is_cut = False
        """Whether the last reading found bytes after the last complete line."""

    def more(self) -> tuple[bool, list[bytes]]:
        """(whether it was read from its start, the complete lines since the last call, each with its line end).

        Raises:
            OSError: the file cannot be read.
        """
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            # Another inode or a smaller size shows another file, the bytes before the place one that was written again.
            same = self._file == (found.st_dev, found.st_ino) and found.st_size >= self._place
            if same and self._tail:
                file.seek(self._place - len(self._tail))
                same = file.read(len(self._tail)) == self._tail
            if not same:
                self._file, self._place, self._tail = (found.st_dev, found.st_ino), 0, b""
            file.seek(self._place)
            text = file.read()
        # The writer may be in the middle of a line, so the place stays at its beginning.
        whole = text[: text.rfind(b"\n") + 1]
        self.is_cut = len(whole) < len(text)
        self._place += len(whole)
        self._tail = (self._tail + whole)[-_CHECKED:]
        return not same, whole.splitlines(keepends=True)

"""Files of strangers: model folders, data folders, checkpoints. Only regular files are read, and texts up to a size.

A FIFO never ends, a device such as /dev/zero neither; opening the one would wait for ever, reading the other would take
all memory.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from diffusionpipe.units import Bytes

_PART = 2**20
_DEAD = "it is a link to nothing"
MAX_TEXT: Bytes = 256 * 2**20
"""The largest text that is read whole; the largest honest ones are metadata.jsonl files of millions of pictures."""


def problem_of_file(path: Path) -> str | None:
    """The reason, as text, why the path is not a regular file, through links; None if it is one, or does not exist."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _DEAD if path.is_symlink() else None
    except OSError as error:
        return _reason(error)
    return None if stat.S_ISREG(mode) else "it is not a regular file"


def read_text(path: Path, limit: Bytes = MAX_TEXT) -> str:
    """The UTF-8 text, without a byte order mark, of a regular file of at most `limit` bytes.

    Raises:
        OSError: it is not a regular file, or cannot be read.
        ValueError: it is too large, or not UTF-8.
    """
    # Opening a link to nothing raises FileNotFoundError, which callers take for "there is no such file".
    if path.is_symlink() and (problem := problem_of_file(path)):
        raise OSError(errno.EINVAL, problem, str(path))
    # Without O_NONBLOCK the open of a FIFO waits for a writer. The open file is examined, not the path, which may name
    # another file by now.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > limit:
            raise ValueError(_too_large(limit))
        return _decoded(file, limit)


def read_named(path: Path, limit: Bytes = MAX_TEXT) -> str:
    """The UTF-8 text, without a byte order mark, of a file that a user names.

    It may be a FIFO, as `<(command)` of a shell is one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, as the devices that never end are, or not UTF-8.
    """
    with path.open("rb") as file:
        return _decoded(file, limit)


def _decoded(file: BinaryIO, limit: Bytes) -> str:
    """The remaining text of the file, read in parts, so that memory grows with the text and not with the limit."""
    data = bytearray()
    while part := file.read(_PART):
        data += part
        if len(data) > limit:
            raise ValueError(_too_large(limit))
    return data.decode("utf-8-sig")  # editors of Windows begin texts with a byte order mark


def _reason(error: OSError) -> str:
    return _DEAD if error.errno == errno.ELOOP else error.strerror or str(error)


def _too_large(limit: Bytes) -> str:
    return f"it has more than {limit:,} bytes"


def read_json(path: Path) -> object:
    """The value that the JSON text of a regular file holds.

    Raises:
        OSError: it is not a regular file, or cannot be read.
        ValueError: it is not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

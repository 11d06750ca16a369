"""Files of strangers: model folders, data folders, checkpoints. Only regular files are read, and texts up to a size.

A FIFO never ends, a device such as /dev/zero neither; opening the one would wait for ever, reading the other would take
all memory.
"""

import json
import os
import stat
from pathlib import Path

from diffusionpipe.units import Bytes

MAX_TEXT: Bytes = 512 * 2**20
"""Of a text that is read whole; the largest honest ones are metadata.jsonl files of millions of pictures."""


def problem_of_file(path: Path) -> str | None:
    """Why the path, through links, is no regular file; None if it is one, or does not exist."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None if stat.S_ISREG(mode) else "it is not a regular file"


def read_text(path: Path, limit: Bytes = MAX_TEXT) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: it is too large, or not UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(22, "it is not a regular file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return data.decode("utf-8")


def read_json(path: Path) -> object:
    """What the JSON text of a regular file holds.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

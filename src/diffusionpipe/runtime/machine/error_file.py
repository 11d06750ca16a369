"""The note that a failing rank leaves for the process that started it.

torch's elastic agent gives every rank a path in `TORCHELASTIC_ERROR_FILE` and reads `message` and `timestamp` from
the JSON found there; we add what the launcher needs to tell the cause from its consequences on the other ranks.
"""

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from diffusionpipe.errors import ConfigError, DiffusionPipeError, PeerError, TrainingError
from diffusionpipe.units import Seconds

LAUNCHED = "DIFFUSIONPIPE_LAUNCHED"
"""The environment variable with our launcher's process id, set for its ranks: they leave their errors in the error
file, and it prints the cause."""
INTERRUPTED = "interrupted by Ctrl-C outside of the training steps; no new checkpoint was saved"

_NO_THREAD = "can't start new thread"
"""Python's words when a thread's stack finds no memory, or when the user may have no more threads."""
_REFUSALS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", _NO_THREAD)
"""The words of torch's and Python's errors on the CPU when there is no more memory."""

_DISK = {
    errno.ENOSPC: "free space on that disk, or choose another folder",
    errno.EDQUOT: "free space within your quota, or choose another folder",
    errno.EROFS: "choose a folder on a disk that can be written",
}
"""Error number of a disk's state -> the remedy."""
_PLACES = {
    errno.EISDIR: "move that folder away",
    errno.ENOTDIR: "a file is where a folder should be; move it away",
    errno.EEXIST: "move it away",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ELOOP: "its links lead back to each other; remove them",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Error number of an obstacle at a path that the user has chosen -> the remedy."""
_SHOWN = 300
"""The most characters of a path in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """The failure of a rank: message, exit status, time, whether another rank caused it, whether it would recur."""

    message: str
    exit_code: int
    is_consequence: bool
    """Whether another rank's failure is the cause."""
    time: Seconds
    """The time of the failure, in seconds since the epoch."""
    is_common: bool = False
    """Whether all ranks have failed alike, so that messages name no rank."""
    would_recur: bool = False
    """Whether a restart from the last checkpoint would fail in the same way."""


def note_of(error: BaseException, traceback: str = "") -> FailureNote:
    """The note for `error`: exit status, time, and a text for the user.

    The text is the error's if it is one of ours, a remedy if memory or a disk is the problem, else `traceback` or, if
    that is "", the error's type and text.
    """
    if isinstance(error, KeyboardInterrupt):
        return FailureNote(message=INTERRUPTED, exit_code=130, is_consequence=False, time=time.time())
    text = str(error) if isinstance(error, DiffusionPipeError) else traceback.rstrip() or f"{_name(error)}: {error}"
    # A shortage and its remedies say more than a traceback.
    text = out_of_memory(error) or text
    disk = disk_problem(error)
    return FailureNote(
        message=disk or text,
        exit_code=2 if disk or isinstance(error, ConfigError) else 1,
        is_consequence=isinstance(error, PeerError),
        time=time.time(),
        is_common=isinstance(error, ConfigError) and error.is_common,
        would_recur=isinstance(error, TrainingError),
    )


def is_shortage(error: BaseException) -> bool:
    """Whether `error` means that the device or the process has no more memory."""
    is_named = isinstance(error, MemoryError) or _name(error) == "OutOfMemoryError"  # torch's, not imported for it
    return is_named or any(refusal in str(error) for refusal in _REFUSALS)


def out_of_memory(error: BaseException) -> str:
    """A text with remedies, if `error` means that the device or the process has no more memory; else ""."""
    said = str(error)
    if not is_shortage(error):
        return ""
    where = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    if _NO_THREAD in said:
        where += "If memory is free, the number of threads is limited instead: raise it (ulimit -u).\n"
    return (
        f"out of memory ({said.splitlines()[0].strip() if said else _name(error)}).\n{where}"
        "Use more stages (pipeline.stages), training.activation_checkpointing, more micro-batches or a smaller "
        'training.batch; pipeline.plan = "auto" chooses a layout that fits.'
    )


def disk_problem(error: BaseException) -> str:
    """A text with a remedy, if `error` is an OSError about a disk or a path that cannot be used; else ""."""
    if isinstance(error, OSError) and error.errno in _PLACES and error.filename:
        return f"cannot use {str(error.filename)[:_SHOWN]}: {os.strerror(error.errno)}; {_PLACES[error.errno]}"
    if not isinstance(error, OSError) or error.errno not in _DISK:
        return ""
    place = f"cannot write {error.filename}" if error.filename else "cannot write a file"
    return f"{place}: {os.strerror(error.errno)}; {_DISK[error.errno]}"


def write_error_file(path: Path, note: FailureNote) -> bool:
    """Write `note` to `path` as JSON; returns whether that was possible. On a full disk nothing is left.

    torch's agent reads any file that is there and ends with its own error where it is not JSON.
    """
    # Renamed when it is whole, so the agent never finds a part of it.
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(json.dumps({**asdict(note), "timestamp": int(note.time)}), encoding="utf-8")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        return False
    return True


def read_error_file(path: Path) -> FailureNote | None:
    """The note at `path`; None when the rank left none, was killed while writing, or wrote it in torch's own form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return FailureNote(**{field.name: found[field.name] for field in fields(FailureNote)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name(error: BaseException) -> str:
    return type(error).__name__

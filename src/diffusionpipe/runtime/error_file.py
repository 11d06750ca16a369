"""The note that a failing rank leaves for whoever started it.

torch's elastic agent gives every rank a path in `TORCHELASTIC_ERROR_FILE` and reads `message` and `timestamp` from
the JSON found there; we add what the launcher needs to tell the cause from its consequences on the other ranks.
"""

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from diffusionpipe.errors import ConfigError, DiffusionPipeError, NonFiniteLossError, PeerError
from diffusionpipe.units import Seconds

LAUNCHED = "DIFFUSIONPIPE_LAUNCHED"
"""Our launcher's process id, set for its ranks: they leave their errors in the error file, it prints the cause."""
INTERRUPTED = "interrupted by Ctrl-C outside of the training steps; no new checkpoint was saved"

_REFUSALS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""What torch's errors say on the CPU when there is no more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """Why a rank ended."""

    message: str
    exit_code: int
    is_consequence: bool
    """Whether another rank's failure is the cause."""
    time: Seconds
    """Since the epoch."""
    is_common: bool = False
    """Whether all ranks have failed alike, so that none is to be named."""
    would_recur: bool = False
    """Whether a restart from the last checkpoint would fail in the same way."""


def note_of(error: BaseException, traceback: str = "") -> FailureNote:
    """The note for `error`: its text if it is one of ours, else `traceback` (or its type and text)."""
    if isinstance(error, KeyboardInterrupt):
        return FailureNote(message=INTERRUPTED, exit_code=130, is_consequence=False, time=time.time())
    text = str(error) if isinstance(error, DiffusionPipeError) else traceback.rstrip() or f"{_name(error)}: {error}"
    text = out_of_memory(error) or text
    return FailureNote(
        message=text,
        exit_code=2 if isinstance(error, ConfigError) else 1,
        is_consequence=isinstance(error, PeerError),
        time=time.time(),
        is_common=isinstance(error, ConfigError) and error.is_common,
        would_recur=isinstance(error, NonFiniteLossError),
    )


def out_of_memory(error: BaseException) -> str:
    """What to say if `error` means that the device or the process has no more memory; "" if it means another thing."""
    said = str(error)
    is_named = isinstance(error, MemoryError) or _name(error) == "OutOfMemoryError"  # torch's, not imported for it
    if not is_named and not any(refusal in said for refusal in _REFUSALS):
        return ""
    return (
        f"out of memory ({said.splitlines()[0].strip() if said else _name(error)}).\n"
        "Use more stages (pipeline.stages), training.activation_checkpointing, more micro-batches or a smaller "
        'training.batch; pipeline.plan = "auto" chooses a layout that fits.'
    )


def write_error_file(path: Path, note: FailureNote) -> None:
    """Leave `note` at `path`; a disk that is full or gone is no reason to fail once more."""
    try:
        path.write_text(json.dumps({**asdict(note), "timestamp": int(note.time)}), encoding="utf-8")
    except OSError:
        return


def read_error_file(path: Path) -> FailureNote | None:
    """The note at `path`; None when the rank left none, was killed while writing, or wrote it in torch's own form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return FailureNote(**{field.name: found[field.name] for field in fields(FailureNote)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name(error: BaseException) -> str:
    return type(error).__name__

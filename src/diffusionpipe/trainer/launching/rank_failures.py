"""How the ranks of a launched job ended, which of them is the cause, and the message to the user."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.errors import ConfigError, PeerError, TrainingError
from diffusionpipe.files.output_file import check_folder, reason_of
from diffusionpipe.runtime.machine.error_file import FailureNote
from diffusionpipe.trainer.launching.exit_status import ExitStatus, of_signal, signal_name

_TAIL = 30
"""Lines of a rank's log that are shown when it left no note."""
_ESCALATION = 20
"""Seconds after the first failure from which a SIGKILL counts as the agent's own (it waits 30 s)."""
_STOPPED = "The other ranks have stopped."


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The end of one rank that failed: exit code, time, and the note that it left."""

    rank: int
    exit_code: int
    """The exit status of the rank's process; negative: the signal that killed it."""
    time: float
    """The time at which the rank failed, in seconds since the epoch."""
    note: FailureNote | None
    """The note that the rank left; None if it was killed or is not a program of ours."""
    is_first: bool = False
    """Whether it ended before the agent terminated any other."""
    frozen: str | None = None
    """Why it did not answer, if the launcher has killed it for that."""


def status_of_signals(failures: Sequence[RankFailure], asked: int | None) -> int | None:
    """The exit status of a job that ended by request, 75 after saving or 128 + n after signal n; None if it failed.

    Args:
        failures: the failures of all ranks that did not end with 0.
        asked: the number of the first signal that the launcher received; None: it received none.
    """
    ends = {failure.exit_code for failure in failures}
    if ExitStatus.STOPPED in ends and ends <= {ExitStatus.STOPPED, -signal.SIGTERM}:
        return ExitStatus.STOPPED  # the agent terminates the ranks that end a little later than the first
    if asked is None:
        return None
    # A rank that is blocked in a transfer ends because of one that the signal has ended before.
    causes = {f.exit_code for f in failures if f.note is None or not f.note.is_consequence}
    return of_signal(asked) if causes <= {of_signal(asked), -asked, -signal.SIGTERM, -signal.SIGKILL} else None


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that caused the others.

    A rank killed from outside comes first, then errors of a rank's own, then those that name another rank (such as a
    frozen one, of which they know more than the launcher), then ranks that the launcher or the agent has ended; within
    each kind the earliest.
    """
    start = min(failure.time for failure in failures)

    def order(failure: RankFailure) -> tuple[int, float]:
        note = failure.note
        if note is not None:
            return (2 if note.is_consequence else 1), note.time
        if failure.frozen is not None:
            return 3, failure.time
        if failure.exit_code == -signal.SIGTERM:
            return (0 if failure.is_first else 4), failure.time
        # Later the agent itself kills ranks that do not end.
        is_killed = failure.exit_code < 0 and failure.time < start + _ESCALATION
        return (0 if is_killed else 1), failure.time

    return min(failures, key=order)


def error_of(failure: RankFailure, log_folder: Path) -> ConfigError | TrainingError | PeerError:
    """The error to raise for `failure`, with the text of its note, or else how it ended and the end of its log."""
    rank, note = failure.rank, failure.note
    if note is not None:
        if note.would_recur:
            return TrainingError(note.message)  # all ranks have raised it
        text = note.message if note.is_consequence or note.is_common else f"rank {rank}: {note.message}"
        return ConfigError(text) if note.exit_code == 2 else PeerError(text)
    if failure.frozen is not None:
        return PeerError(f"rank {rank} was frozen, {failure.frozen}, so the launcher ended it. {_STOPPED}")
    if failure.exit_code < 0:
        number = -failure.exit_code
        why = "; the system may have run out of memory" if number == signal.SIGKILL else ""
        text = f"rank {rank} was killed by signal {number} ({signal_name(number)}){why}. {_STOPPED}"
        return PeerError("\n".join([text, *_end_of_log(log_folder, rank)]))
    text = f"rank {rank} failed with exit status {failure.exit_code}"
    if log := _end_of_log(log_folder, rank):
        text = "\n".join([f"{text}:", *log])
    else:
        text += "; its output is above." if rank == 0 else f" and {_silence(log_folder)}."
    return ConfigError(text) if failure.exit_code == 2 else PeerError(text)


def _silence(log_folder: Path) -> str:
    """The end of a sentence about a rank whose log is empty: "wrote nothing", or why the folder cannot be written."""
    try:
        check_folder(log_folder)
    except OSError as error:
        return f"wrote no log: cannot write {log_folder}: {reason_of(error)}"
    return "wrote nothing"


def _end_of_log(log_folder: Path, rank: int) -> list[str]:
    """The last lines of a rank's log under a heading; [] if it wrote none or, as rank 0, to the terminal."""
    file = output_file(log_folder, rank, "err")
    if rank == 0 or not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"the end of {file}:", *lines[-_TAIL:]] if lines else []


def output_file(log_folder: Path, rank: int, stream: str) -> Path:
    """The path of the file to which a rank above 0 writes its `stream`, "out" or "err"."""
    return log_folder / f"rank_{rank}.{stream}"

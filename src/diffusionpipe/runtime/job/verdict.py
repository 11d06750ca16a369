"""Which rank ended the run, and how: the data that watchdogs exchange."""

import json
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from diffusionpipe.runtime.machine.machine_use import boot_id


class ExitReason(StrEnum):
    """How the rank that a verdict names has ended: it failed, died, fell silent, hangs, or its store is lost."""

    FAILED = "failed"
    """The rank raised an error and said so."""
    DIED = "died"
    """The rank's process does not exist any more."""
    SILENT = "silent"
    """The rank stopped answering."""
    STUCK = "stuck"
    """The rank lives, but makes no progress."""
    STORE_LOST = "store lost"
    """The store cannot be reached: the process that holds it died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank with the host and the id of its process."""

    rank: int
    host: str
    pid: int
    machine: str
    """A name that is equal on two ranks that see each other's processes; "" where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rank that ended the run, and how it ended."""

    fate: ExitReason
    reason: str
    """The words that follow the name of the rank in messages, such as "failed: ..."."""
    member: RankProcess | None = None
    """The rank that ended the run; None: the launcher that held the store ended it."""

    def message(self, rank: int) -> str:
        """The text that the rank `rank` prints about the end of the run."""
        member = self.member
        if member is None:
            return f"the launcher {self.reason}\nRank {rank} stops too."
        place = f"{member.host}, process {member.pid}" if member.pid else "on an unknown host"
        named = f"rank {member.rank} ({place}) {self.reason}"
        if self.fate is ExitReason.STUCK:
            return named
        if member.rank == rank and self.fate is not ExitReason.FAILED:
            return f"this rank ({rank}) {self.reason}, so the other ranks have ended the run."
        return f"{named}\nRank {rank} stops too."


def this_member(rank: int) -> RankProcess:
    """The record of this process as the process of `rank`: its host, process id and machine."""
    return RankProcess(rank=rank, host=socket.gethostname(), pid=os.getpid(), machine=_machine())


def is_gone(member: RankProcess, seen_from: RankProcess) -> bool:
    """Whether the rank's process has certainly ended; always False for one that cannot be seen from `seen_from`."""
    if not _is_visible(member, seen_from):
        return False
    state = state_of_process(member.pid)
    return state is not None and state in {"", "Z", "X"}  # Z: ended, but not yet collected by its parent


FROZEN = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "waiting for a device or a file system (state D)",
}
"""The letter of a process's state in /proc -> its name in words, for states in which a process does not answer."""


def why_frozen(member: RankProcess, seen_from: RankProcess) -> str | None:
    """The reason why the process does not answer, one of `FROZEN`'s texts; None: it has no such state, or is unseen."""
    return FROZEN.get(state_of_process(member.pid) or "") if _is_visible(member, seen_from) else None


def state_of_process(pid: int) -> str | None:
    """The letter of the process's state in /proc: "" if there is no such process, None if that cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # Without /proc a missing file says nothing of the process.
        return "" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    # The name in brackets may hold brackets and spaces.
    return status.rpartition(")")[2].split()[0]


def _is_visible(member: RankProcess, seen_from: RankProcess) -> bool:
    """Whether the process `seen_from` can see the process `member`."""
    return bool(seen_from.machine) and member.machine == seen_from.machine


def parse_member(text: str) -> RankProcess:
    """The rank's process in a JSON text that `json.dumps(asdict(member))` has made.

    Raises:
        ValueError: the text is not JSON.
        TypeError: it has other fields.
    """
    return RankProcess(**json.loads(text))


def parse_verdict(text: str) -> Verdict:
    """The verdict in a JSON text that `json.dumps(asdict(verdict))` has made.

    Raises:
        ValueError: the text is not JSON, or it has an unknown fate.
        KeyError: a field is missing.
        TypeError: the member has other fields.
    """
    found = json.loads(text)
    member = None if found["member"] is None else RankProcess(**found["member"])
    return Verdict(fate=ExitReason(found["fate"]), reason=found["reason"], member=member)


def _machine() -> str:
    """A name of this machine's boot and of the process namespace of this process; "" where the system has none.

    Containers may share a host's name, but not each other's processes.
    """
    boot = boot_id()
    try:
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}" if boot else ""
    except OSError:
        return ""

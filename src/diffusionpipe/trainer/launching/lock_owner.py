"""The holder of the lock of a run folder, whether its job lives, and the message to a second job."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from diffusionpipe.runtime.job.verdict import RankProcess, is_gone
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often the owner of a lock shows a sign of life, and how long others wait for it, in seconds."""

    beat: Seconds = 5.0
    """The time between two signs of life of an owner."""
    stale: Seconds = 60.0
    """Silence after which an owner on another machine may be dead."""
    ending: Seconds = 15.0
    """The longest wait for the end of the ranks of a launcher that was killed."""


USUAL = Timing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that holds a lock: its host, process id, machine and the time at which it took the lock."""

    host: str
    pid: int
    machine: str
    """Boot and process namespace, see `RankProcess.machine`."""
    started: Seconds
    """The time at which the process took the lock, in seconds since the epoch."""

    def __str__(self) -> str:
        try:
            since = datetime.fromtimestamp(self.started).astimezone().isoformat(sep=" ", timespec="seconds")
        except (ValueError, OverflowError, OSError):  # a clock that was wrong, or a file of a stranger
            since = "an unknown time"
        return f"process {self.pid} on {self.host}, which has used it since {since}"


class Life(StrEnum):
    """Whether the owner of a lock is alive, as far as another process can see."""

    NONE = "no owner"
    GONE = "its process is gone"
    ENDING = "its process is gone, but ranks of its job still live"
    ALIVE = "it is alive"
    ELSEWHERE = "it is on another machine"


def life_of(owner: Owner | None, me: RankProcess, *, is_locked: bool | None) -> Life:
    """Whether a lock's owner is alive, as far as a process can see without waiting.

    Args:
        owner: the file's content; None: it is empty.
        me: the process that asks.
        is_locked: whether another process holds the flock; None: the file system has none.
    """
    if owner is None:
        return Life.ALIVE if is_locked else Life.NONE
    # A machine is a boot and a namespace of processes: containers of one host share its kernel, and so its flocks.
    is_same_kernel = bool(me.machine) and owner.machine.partition("/")[0] == me.machine.partition("/")[0]
    is_process_gone = is_gone(RankProcess(rank=0, host=owner.host, pid=owner.pid, machine=owner.machine), me)
    if is_locked is False and is_same_kernel:
        return Life.GONE
    # A held flock without its owner: the ranks of a launcher that was killed.
    if is_process_gone:
        return Life.ENDING if is_locked else Life.GONE
    # A flock that another container holds shows a live process, though its number says nothing here.
    is_seen = owner.machine == me.machine or (is_locked is True and is_same_kernel)
    return Life.ALIVE if is_seen and me.machine else Life.ELSEWHERE


def refusal(folder: Path, owner: Owner | None, life: Life, *, age: Seconds, take_over: bool) -> str:
    """The message that a second job may not use the folder: its owner, and the remedy.

    `age`: seconds since the owner's last sign of life; `take_over`: the second job asked for the lock.
    """
    who = str(owner) if owner is not None else "a job that is just starting"
    text = f"{folder} is in use by {who}"
    if life is not Life.ELSEWHERE:
        useless = "; --take-over is only for jobs that are dead" if take_over and life is Life.ALIVE else ""
        return f"{text}. Wait until that job has ended, stop it, or choose another run.folder{useless}."
    sign = f"{text}. Its last sign of life was {max(0.0, age):.0f} s ago"
    if age <= USUAL.stale:
        return f"{sign}: wait until that job has ended, stop it, or choose another run.folder."
    return f"{sign}. If it is dead, add --take-over: it waits for a sign of life and takes the folder if there is none."

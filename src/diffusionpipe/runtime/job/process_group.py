"""Joining the job: from torchrun's environment variables to a running torch.distributed and its watchdog.

    with joined(membership(environ), device="cpu") as job:
        job.agree("torch", torch.__version__)
        ...                                     # an error here ends every other rank within seconds and names this one

Without torchrun's variables the job is this one process: no port, no network. Install handlers of SIGTERM only inside
the block: a rank that still waits for the others must die of SIGTERM as any program does.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # no stub has them

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime.job.admission import Applicant, admit, private_keys
from diffusionpipe.runtime.job.devices import VisibleDevice, agreed_device, sight
from diffusionpipe.runtime.job.interfaces import GLOO, NAMED_INTERFACES, check_interfaces
from diffusionpipe.runtime.job.interrupts import was_interrupted
from diffusionpipe.runtime.job.job_store import store_of
from diffusionpipe.runtime.job.loopback import kept_local
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.runtime.job.parent_death import outlive_parent
from diffusionpipe.runtime.job.progress import Progress
from diffusionpipe.runtime.job.watch_post import Post, end_process
from diffusionpipe.runtime.job.watchdog import Watchdog
from diffusionpipe.runtime.machine.error_file import FailureNote, note_of, write_error_file
from diffusionpipe.units import Seconds

_TRANSFER: Seconds = 1800.0
"""The time that one transfer may take; deaths are noticed long before."""
_DEADLINE = 10
"""Seconds that a failing rank has for its clean-up: NCCL's may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job whose process group runs: this rank's membership, device, store, watchdog and progress."""

    membership: Membership
    device: torch.device
    store: Store
    watchdog: Watchdog
    progress: Progress

    def everyone(self, name: str, text: str) -> list[str]:
        """The text of each rank, in the order of ranks; every rank calls it with the same name, once per name."""
        return gather_via_store(self.store, self.membership, name, text)

    def agree(self, name: str, value: str) -> None:
        """Check that all ranks have the same `value`; every rank calls this with the same name, once per name.

        Raises:
            ConfigError: on every rank alike, naming the ranks that differ from rank 0.
        """
        values = self.everyone(f"agree/{name}", value)
        differing = [f"rank {rank} has {other!r}" for rank, other in enumerate(values) if other != values[0]]
        if differing:
            error = ConfigError(
                f"the ranks do not agree on {name}: rank 0 has {values[0]!r}, {', '.join(differing)}. "
                "Start all of them with the same versions, files and arguments."
            )
            error.is_common = True
            raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A job whose ranks have met but have no process group yet: they can exchange texts through the store."""

    membership: Membership
    sight: VisibleDevice
    """This rank's view of its machine."""
    store: Store
    watchdog: Watchdog
    progress: Progress

    def everyone(self, name: str, text: str) -> list[str]:
        """The text of each rank, in the order of ranks; every rank calls it with the same name, once per name."""
        return gather_via_store(PrefixStore("meeting", self.store), self.membership, name, text)


def gather_via_store(store: Store, member: Membership, name: str, text: str) -> list[str]:
    """The text of each rank, in the order of ranks, exchanged through the store under `name`; every rank calls it."""
    store.set(f"{name}/{member.rank}", text)
    return [store.get(f"{name}/{rank}").decode() for rank in range(member.world_size)]


@contextmanager
def joined(member: Membership, *, device: str, arrival: Seconds = 300.0, patience: Seconds = 8.0) -> Iterator[Job]:
    """Join the job with device and process group, for the length of the block; it ends when all ranks reach its end.

    An error in the block is sent to the other ranks, which then end within seconds. When another rank ended first, this
    rank raises a `PeerError` that names it or, blocked in a transfer, ends with that text and status 1.

    Args:
        member: from `membership`.
        device: "cpu" (gloo), "cuda" (NCCL, and gloo for tensors on the CPU), or "auto": CUDA where ranks have it.
        arrival: how long to wait for all ranks to come.
        patience: silence after which a rank counts as gone.

    Raises:
        ConfigError: the port is in use, the master cannot be reached, ranks do not come, do not have the token, or have
            devices that do not suit each other (see `devices`); the environment names an interface that is not there.
        RuntimeError: gloo or NCCL cannot connect the ranks.
        PeerError: another rank has failed or died.
    """
    # Before the ranks meet: the device must be set before anything uses CUDA.
    own = sight(device, member.local_rank)
    if member.world_size > 1:
        check_interfaces(os.environ, (GLOO,) if own.index is None else NAMED_INTERFACES)
    with met(member, own, arrival=arrival, patience=patience) as meeting:
        yield opened(meeting, timeout=_TRANSFER)


@contextmanager
def met(
    member: Membership, own: VisibleDevice, *, arrival: Seconds = 300.0, patience: Seconds = 8.0
) -> Iterator[Meeting]:
    """The first half of `joined`: in the block all ranks have come and have the token, but no device is agreed on.

    A process group that is `opened` in the block ends with it.

    Raises:
        ConfigError: the port is in use, the master cannot be reached, ranks do not come or do not have the token.
        PeerError: another rank has failed or died.
    """
    meeting, connect = store_of(member, arrival, patience)
    store = private_keys(meeting, member.token)
    post = Post(rank=member.rank, world_size=member.world_size, store_rank=member.store_rank, patience=patience)
    progress = Progress(member.rank)
    watchdog = Watchdog(
        post=post,
        connect=connect,
        end=ending(member),
        note=lambda error: _leave_note(error, member),
        progress=progress,
    )
    try:
        with kept_local(member.address), watchdog.guard():
            if member.world_size > 1:
                outlive_parent()  # the watchdog notices the launcher's end and says so
            me = Applicant(rank=member.rank, world_size=member.world_size, token=member.token)
            admit(meeting, me, arrival=arrival)
            yield Meeting(membership=member, sight=own, store=store, watchdog=watchdog, progress=progress)
    except BaseException:
        # The clean-up of NCCL may hang on a dead peer. Where a note can be left, the process ends without it.
        if member.world_size > 1 and member.error_file is not None:
            _end_soon()
        if member.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()  # nobody else can block it, and the caller may start another job
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def opened(meeting: Meeting, *, timeout: Seconds) -> Job:
    """The second half of `joined`: agree on devices and open the process group; returns the job. Every rank calls it.

    Raises:
        ConfigError: the ranks have devices that do not suit each other.
        RuntimeError: gloo or NCCL cannot connect the ranks.
    """
    member = meeting.membership
    place = agreed_device(meeting.store, member.rank, member.world_size, meeting.sight)
    dist.init_process_group(
        backend="gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=PrefixStore("process_group", meeting.store),
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=place if place.type == "cuda" else None,
    )
    return Job(
        membership=member,
        device=place,
        store=PrefixStore("job", meeting.store),
        watchdog=meeting.watchdog,
        progress=meeting.progress,
    )


def leave(error: BaseException, member: Membership) -> NoReturn:
    """End this process because of `error`: write the error file, print the text, exit with the error's status.

    Neither destroying a broken NCCL communicator nor leaving it to the interpreter's end is sure to return, so the
    process has `_DEADLINE` seconds for its end.
    """
    status, text = failed(error, member)
    if text:
        sys.stderr.write(f"{text}\n")
    if member.world_size > 1:
        _end_soon()
    sys.exit(status)


def failed(error: BaseException, member: Membership) -> tuple[int, str]:
    """(exit status, text to print) for `error`; the text is "" where our launcher prints it.

    It also writes the error file.
    """
    note, is_left = _leave_note(error, member)
    return note.exit_code, "" if is_left and member.is_heard else note.message


def _leave_note(error: BaseException, member: Membership) -> tuple[FailureNote, bool]:
    """(note about the error, whether it has been written into the error file)."""
    # The error may be a consequence of Ctrl-C in disguise (`interrupts`).
    if was_interrupted():
        error = KeyboardInterrupt()
    note = note_of(error, "".join(traceback.format_exception(error)))
    return note, member.error_file is not None and write_error_file(member.error_file, note)


def _end_soon() -> None:
    # A thread of C ends the process even if Python's lock is held. Its traceback is of no use and goes to no file.
    faulthandler.dump_traceback_later(_DEADLINE, exit=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def ending(member: Membership) -> Callable[[str], None]:
    """A function that ends this process, with a PeerError's status and the message that it is given.

    It works even while the main thread is blocked, and writes the error file.
    """

    def end(message: str) -> None:
        status, text = failed(PeerError(message), member)
        if text:
            end_process(text)
        # The main thread may be blocked, so no exception would reach it.
        os._exit(status)

    return end

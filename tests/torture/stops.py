"""Signals that ask a job to end: to the launcher, as a terminal or a scheduler sends them, or to one rank."""

import signal
from dataclasses import dataclass
from functools import partial

import psutil
from kit.moments import Moment
from kit.tiny_runs import losses_of
from torture.cases import (
    SOON,
    Case,
    Scene,
    check_kept,
    check_killed,
    check_plain,
    finish,
    reach,
    start_forked,
    strike,
    train_until,
)
from torture.findings import CauseError, LostError

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
STOPPED = 75


@dataclass(frozen=True)
class Stop:
    """A signal while one rank is at a moment."""

    number: int
    at: Moment
    status: int | None
    """With which the job must end; None: as one that failed because of the rank that the signal was sent to."""
    rank: int | None = None
    """Where the signal is sent; None: to the launcher."""
    flavour: str = "stages"
    starts_at: int | None = None
    is_later: bool = False

    @property
    def what(self) -> str:
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        later = " and a little" if self.is_later else ""
        name = signal.Signals(self.number).name
        return f"{name} to {who} at rank {self.at.rank}: {self.at.place}{later}, {self.flavour}"


STOPS = (
    Stop(TERM, Moment("start", 1), 143),
    Stop(INT, Moment("joining", 0), 130),
    Stop(HUP, Moment("reading the model", 1), 129),
    Stop(INT, Moment("reading the data", 0), 130, flavour="three"),
    Stop(TERM, Moment("measuring", 1, 5), 143, flavour="searched"),
    Stop(INT, Moment("measuring", 0, 9), 130, flavour="searched"),
    Stop(TERM, Moment("loading", 1), STOPPED, starts_at=4),
    Stop(TERM, Moment("starting workers", 1), STOPPED, flavour="workers", is_later=True),
    Stop(TERM, Moment("a step", 0, 7), STOPPED),
    Stop(INT, Moment("a backward", 1, 9), STOPPED),
    Stop(HUP, Moment("the sum", 1, 6), STOPPED, flavour="sharded", is_later=True),
    Stop(TERM, Moment("a step", 1, 6), STOPPED, rank=1),
    Stop(TERM, Moment("writing tensors", 1), STOPPED),
    Stop(INT, Moment("a validation batch", 0, 2), STOPPED, flavour="three"),
    Stop(HUP, Moment("a drawing step", 1), STOPPED),
    Stop(TERM, Moment("exporting", 0), 143),
    Stop(INT, Moment("writing the export", 0), 130),
    Stop(HUP, Moment("drawing results", 0), 129),
    Stop(TERM, Moment("exporting", 0), None, rank=1),
    Stop(TERM, Moment("writing the export", 0), None, rank=0),
    Stop(TERM, Moment("reading the model", 0), None, rank=1),
)


def cases() -> list[Case]:
    """All of them."""
    return [Case("signals", stop.what, partial(run, stop)) for stop in STOPS]


def run(stop: Stop, scene: Scene) -> str:
    """Ask to end, look at how it ends, resume, compare."""
    words = ()
    if stop.starts_at is not None:
        train_until(stop.starts_at, stop.flavour, scene)
        words = ("--resume", "auto")
    job = start_forked(scene, stop.flavour, *words, moment=stop.at)
    try:
        before = reach(job, stop.at)
        victim = psutil.Process(job.pid) if stop.rank is None else job.rank(stop.rank)
        strike(job, [victim], stop.number, scene, waits=stop.is_later)
        status, error = job.end(2 * SOON)
    finally:
        job.kill_all()
    check_plain(error)
    if stop.status is None:
        assert stop.rank is not None
        check_killed(status, error, stop.rank, stop.number)
    elif status != stop.status:
        raise CauseError(f"status {status} instead of {stop.status}:\n{error[-2000:]}")
    elif "error:" in error:
        raise CauseError(f"an error where all is well:\n{error[-2000:]}")
    saved = check_kept(before, job.folder)
    if stop.status == STOPPED and max(saved) != max(losses_of(job.folder)):
        raise LostError(f"step {max(losses_of(job.folder))} is done, but the last checkpoint is of step {max(saved)}")
    return f"status {status} after {job.took:.0f} s, {finish(scene, stop.flavour)}"

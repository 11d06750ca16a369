"""A rank, the launcher or all processes are killed with SIGKILL at a given moment; then the run is resumed."""

import signal
from dataclasses import dataclass
from functools import partial

import psutil
from kit.moments import Moment
from torture.cases import (
    LINGERS,
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
from torture.findings import CauseError

LAUNCHER = -1
EVERYTHING = -2
WHO = {LAUNCHER: "the launcher", EVERYTHING: "every process"}


@dataclass(frozen=True)
class Kill:
    """A kill while one rank is at a moment."""

    kind: str
    at: Moment
    victim: int
    """A rank, or one of `WHO`."""
    flavour: str = "stages"
    is_later: bool = False
    """Some milliseconds after the moment instead of just before."""
    other: tuple[int, tuple[tuple[str, object], ...]] | None = None
    """Ranks and keys of [pipeline] of another layout on which the run is resumed."""
    starts_at: int | None = None
    """A checkpoint of this step is there before the start."""

    @property
    def what(self) -> str:
        who = WHO.get(self.victim, f"rank {self.victim}")
        where = f"rank {self.at.rank}: {self.at.place}" + (f" ({self.at.count})" if self.at.count > 1 else "")
        later = " and a little" if self.is_later else ""
        other = f", resumed on {self.other[0]} ranks" if self.other else ""
        return f"{who} at {where}{later}, {self.flavour}{other}"


def _plain(kind: str, place: str, holder: int, victim: int, count: int = 1, **options: object) -> Kill:
    return Kill(kind=kind, at=Moment(place, holder, count), victim=victim, **options)  # type: ignore[arg-type]


ALONE = (1, (("stages", 1),))
TWO = (2, (("stages", 2),))
THREE = (3, (("stages", 3),))

KILLS = (
    _plain("start-up", "start", 1, 1),
    _plain("start-up", "start", 0, LAUNCHER),
    _plain("start-up", "joining", 0, 0),
    _plain("start-up", "joining", 1, LAUNCHER),
    _plain("start-up", "the lock", 0, 1),
    _plain("start-up", "reading the model", 1, 1),
    _plain("start-up", "reading the model", 0, LAUNCHER),
    _plain("start-up", "reading the data", 0, 0, flavour="three"),
    _plain("start-up", "planning", 2, 2, flavour="three"),
    _plain("start-up", "verifying", 1, 0, starts_at=4),
    _plain("start-up", "loading", 1, 1, starts_at=4),
    _plain("start-up", "loading", 0, LAUNCHER, starts_at=4),
    _plain("measuring", "measuring", 0, 0, 3, flavour="searched"),
    _plain("measuring", "measuring", 1, 1, 12, flavour="searched"),
    _plain("measuring", "measuring", 1, LAUNCHER, 12, flavour="searched"),
    _plain("measuring", "planning", 0, 1, flavour="searched"),
    _plain("steps", "a step", 0, 0),
    _plain("steps", "a step", 1, 1, 5),
    _plain("steps", "a step", 2, 1, 7, flavour="three"),
    _plain("steps", "a backward", 1, 1, 13),
    _plain("steps", "a backward", 0, 0, 9, flavour="float64", other=ALONE),
    _plain("steps", "a backward", 1, 0, 11, flavour="float64", other=THREE),
    _plain("steps", "the sum", 1, 1, 6, flavour="float64", other=ALONE),
    _plain("steps", "the sum", 0, 1, 7, flavour="sharded"),
    _plain("steps", "the sum", 1, 0, 9, flavour="sharded", is_later=True),
    _plain("steps", "recording", 0, 0, 7, flavour="three"),
    _plain("steps", "a step", 0, LAUNCHER, 6),
    _plain("steps", "a step", 1, LAUNCHER, 9, flavour="three", is_later=True),
    _plain("steps", "a step", 1, EVERYTHING, 7),
    _plain("steps", "a step", 0, 1, 6, flavour="workers"),
    _plain("steps", "an update", 1, 1, 6, flavour="stashed"),
    _plain("steps", "the sum of a window", 0, 1, 7, flavour="newest", is_later=True),
    _plain("checkpoint", "writing tensors", 1, 1, 2, flavour="delayed"),
    _plain("checkpoint", "making the folder", 0, 1, 2),
    _plain("checkpoint", "writing tensors", 0, 0),
    _plain("checkpoint", "writing tensors", 1, 1, 2),
    _plain("checkpoint", "writing tensors", 1, 0, 2, flavour="sharded", is_later=True),
    _plain("checkpoint", "writing tensors", 0, 1, 2, flavour="three", is_later=True),
    _plain("checkpoint", "writing tensors", 1, 1, 1, flavour="asynchronous"),
    _plain("checkpoint", "writing tensors", 0, 1, 2, flavour="asynchronous"),
    _plain("checkpoint", "writing tensors", 1, LAUNCHER, 2, flavour="asynchronous"),
    _plain("checkpoint", "publishing", 0, 0, 2, flavour="asynchronous"),
    _plain("checkpoint", "publishing", 0, EVERYTHING, 2, flavour="asynchronous", is_later=True),
    _plain("checkpoint", "checksums", 1, 1, 2),
    _plain("checkpoint", "publishing", 0, 0, 2),
    _plain("checkpoint", "publishing", 0, 1, 2, is_later=True),
    _plain("checkpoint", "the manifest", 0, 0, 2, flavour="float64", other=ALONE),
    _plain("checkpoint", "the rename", 0, 0, 2),
    _plain("checkpoint", "the rename", 0, EVERYTHING, 2),
    _plain("checkpoint", "pruning", 0, 0, 2, flavour="sharded"),
    _plain("checkpoint", "writing tensors", 1, LAUNCHER, 2),
    _plain("checkpoint", "publishing", 0, LAUNCHER, 2, is_later=True),
    _plain("checkpoint", "publishing", 0, EVERYTHING, 3, is_later=True),
    _plain("validation", "validating", 0, 0, 2),
    _plain("validation", "a validation batch", 1, 1, 2),
    _plain("validation", "a validation batch", 0, LAUNCHER, 2),
    _plain("validation", "a validation batch", 1, 0, 3, flavour="three", is_later=True),
    _plain("drawing", "drawing", 1, 1),
    _plain("drawing", "a drawing step", 0, 0, 2),
    _plain("drawing", "a drawing step", 1, 0, 3, flavour="three", is_later=True),
    _plain("drawing", "decoding", 0, 1),
    _plain("drawing", "keeping samples", 0, 0, 2),
    _plain("drawing", "a drawing step", 1, LAUNCHER, 2),
    _plain("export", "exporting", 0, 0),
    _plain("export", "exporting", 0, 1),
    _plain("export", "writing the export", 0, 0),
    _plain("export", "replacing the export", 0, 1, flavour="three"),
    _plain("export", "replacing the export", 0, 0, is_later=True),
    _plain("export", "writing the export", 0, LAUNCHER),
    _plain("export", "drawing results", 0, 0, flavour="float64", other=TWO),
)


def cases() -> list[Case]:
    """All of them."""
    return [Case(kill.kind, kill.what, partial(run, kill)) for kill in KILLS]


def run(kill: Kill, scene: Scene) -> str:
    """Kill, look at the end of the job, resume, compare."""
    words = ()
    if kill.starts_at is not None:
        train_until(kill.starts_at, kill.flavour, scene)
        words = ("--resume", "auto")
    job = start_forked(scene, kill.flavour, *words, moment=kill.at)
    try:
        before = reach(job, kill.at)
        launcher = psutil.Process(job.pid)
        victims = {LAUNCHER: [launcher], EVERYTHING: job.processes()}.get(kill.victim) or [job.rank(kill.victim)]
        is_hit = strike(job, victims, signal.SIGKILL, scene, waits=kill.is_later)
        status, error = job.end(SOON, lingers=LINGERS)
    finally:
        job.kill_all()
    if not is_hit or (kill.is_later and status == 0):
        return "the job was faster"
    if kill.victim >= 0:
        check_killed(status, error, kill.victim)
    else:
        check_plain(error)
        if status != -signal.SIGKILL:
            raise CauseError(f"the launcher ended with {status}")
    check_kept(before, job.folder)
    if kill.other is None:
        return f"ended after {job.took:.0f} s, {finish(scene, kill.flavour)}"
    ranks, pipeline = kill.other
    return f"ended after {job.took:.0f} s, {finish(scene, kill.flavour, ranks=ranks, pipeline=dict(pipeline))}"

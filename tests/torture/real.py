"""Kills of real processes: the program starts as a user starts it, and nothing in it waits for the test."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from kit.jobs import Command
from kit.tiny_runs import losses_of
from torture.cases import LINGERS, SOON, Case, Scene, check_kept, check_killed, check_plain, finish
from torture.findings import CauseError
from torture.inputs import saved_steps
from torture.kills import LAUNCHER, WHO


@dataclass(frozen=True)
class RealKill:
    """A kill as soon as something can be seen from outside."""

    event: str
    has_happened: Callable[[Command], bool]
    victim: int
    flavour: str = "stages"
    pause: float = 0.0
    """Up to so many seconds more."""

    @property
    def what(self) -> str:
        return f"{WHO.get(self.victim, f'rank {self.victim}')}, {self.event}, {self.flavour}"


def _has_started(rank: int) -> Callable[[Command], bool]:
    return lambda job: job.rank_now(rank) is not None


def _has_said(words: str) -> Callable[[Command], bool]:
    return lambda job: words in job.said()


def _has_done(step: int) -> Callable[[Command], bool]:
    return lambda job: max(losses_of(job.folder), default=0) >= step


def _is_there(pattern: str) -> Callable[[Command], bool]:
    return lambda job: any(Path(job.folder).glob(pattern))


KILLS = (
    RealKill("imports", _has_started(1), 1, pause=3),
    RealKill("imports", _has_started(0), 0, pause=3),
    RealKill("its own imports", lambda job: True, LAUNCHER, pause=2),
    RealKill("imports of the ranks", _has_started(1), LAUNCHER, pause=3),
    RealKill("the ranks meet", _has_said("rank=0 "), 1),
    RealKill("measuring", _has_said("measuring layers"), 1, "searched", pause=1),
    RealKill("in a step", _has_done(1), 0),
    RealKill("in a step", _has_done(6), 1, "three"),
    RealKill("in a step", _has_done(9), LAUNCHER, "sharded"),
    RealKill("just before validation", _has_done(8), 0),
    RealKill("writing the first checkpoint", _is_there("checkpoints/.step-00000004.writing"), 1),
    RealKill("writing the second checkpoint", _is_there("checkpoints/.step-00000008.writing"), 0, "sharded"),
    RealKill("writing the second checkpoint", _is_there("checkpoints/.step-00000008.writing/*"), LAUNCHER),
    RealKill("the checkpoint has its name", _is_there("checkpoints/step-00000008"), 0),
    RealKill("drawing samples", _has_done(6), 0, "stages"),
    RealKill("writing the export", _is_there(".export.writing"), 0),
    RealKill("writing the export", _is_there(".export.writing/*"), 1),
)


def cases() -> list[Case]:
    """All of them."""
    return [Case("real", kill.what, partial(_run, kill)) for kill in KILLS]


def _run(kill: RealKill, scene: Scene) -> str:
    recipe = scene.inputs.recipe(scene.name, kill.flavour)
    job = Command(recipe, ranks=3 if kill.flavour == "three" else 2)
    try:
        job.await_event(partial(kill.has_happened, job), kill.event)
        time.sleep(kill.pause * scene.random.random())
        victim = psutil.Process(job.pid) if kill.victim == LAUNCHER else job.rank(kill.victim)
        before = [step for step in saved_steps(job.folder) if step] if kill.event != "its own imports" else []
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
        status, error = job.end(SOON, lingers=LINGERS)
    finally:
        job.kill_all()
    if kill.victim >= 0:
        check_killed(status, error, kill.victim)
    else:
        check_plain(error)
        if status != -signal.SIGKILL:
            raise CauseError(f"the launcher ended with {status}")
    check_kept(before, job.folder)
    return f"ended after {job.took:.0f} s, {finish(scene, kill.flavour)}"

"""What a case of `make torture` is, and the parts that most cases have in common."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from kit.forked_jobs import ForkedCommand
from kit.jobs import Job
from kit.moments import Moment
from torture.findings import CauseError, LostError
from torture.inputs import FLAVOURS, Inputs, saved_steps

SOON = 25.0
"""Seconds within which a job must have ended after one of its processes was killed; 1 to 3 s on a quiet machine."""
LINGERS = 15.0
"""Seconds that ranks may live after their launcher was killed; 0 to 2 s on a quiet machine."""


@dataclass(frozen=True)
class Scene:
    """What a case is given."""

    inputs: Inputs
    random: Random
    name: str
    """Of the run, a folder of its own."""


@dataclass(frozen=True)
class Case:
    """One disturbance of one job, and what must follow."""

    kind: str
    what: str
    act: Callable[[Scene], str]
    """Returns what is to be told; raises one of `findings`."""
    kills: int = 1
    """Processes that are killed, stopped or told to end."""


def start_forked(
    scene: Scene,
    flavour: str,
    *words: str,
    moment: Moment | None = None,
    patches: str = "",
    **sections: dict[str, object],
) -> ForkedCommand:
    """A job of a flavour on its usual number of ranks."""
    recipe = scene.inputs.recipe(scene.name, flavour, **sections)
    return ForkedCommand(recipe, *words, ranks=FLAVOURS[flavour].ranks, moment=moment, patches=patches)


def reach(job: Job, moment: Moment) -> list[int]:
    """Wait until the job is at the moment; the steps of the checkpoints that it has."""
    job.await_event((job.place / "reached").exists, moment.place)
    return saved_steps(job.folder)


def go_on(job: Job) -> None:
    """Let the rank go on that waits at its moment."""
    (job.place / "go").touch()


def strike(job: Job, victims: Sequence[psutil.Process], number: int, scene: Scene, *, waits: bool) -> bool:
    """Send a signal to processes that are at a moment, or `waits`: a little later; whether any was still there."""
    if waits:
        go_on(job)
        time.sleep(0.05 * scene.random.random())
    is_hit = False
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            is_hit = True
    go_on(job)
    return is_hit


def check_killed(status: int, error: str, rank: int, number: int = signal.SIGKILL) -> None:
    """The job has failed because of this rank, and says so in a block without a traceback.

    Raises:
        CauseError: it says something else.
    """
    named = re.search(r"^error: (rank (\d+)\b.*)", error, flags=re.MULTILINE)
    name = signal.Signals(number).name
    if status != 1 or named is None or int(named[2]) != rank:
        raise CauseError(f"status {status} instead of 1 and the name of rank {rank}:\n{error[-2000:]}")
    if name not in named[1] and "died: its process is gone" not in named[1]:
        raise CauseError(f"no word of {name}:\n{error[-2000:]}")
    check_plain(error)


def check_plain(error: str) -> None:
    """No traceback has come to the terminal.

    Raises:
        CauseError: one has.
    """
    if "Traceback" in error:
        raise CauseError(f"a traceback:\n{error[-3000:]}")


def check_kept(before: Sequence[int], folder: Path) -> list[int]:
    """The steps of the checkpoints now, the newest of which is none older than before.

    Raises:
        LostError: it is older.
    """
    now = saved_steps(folder)
    if before and max(now, default=0) < max(before):
        raise LostError(f"there were checkpoints of steps {before}, now {now}")
    return now


def finish(scene: Scene, flavour: str, *, ranks: int | None = None, **sections: dict[str, object]) -> str:
    """Resume the run until its end and compare it with the uninterrupted one.

    `ranks` and `sections`: another layout.

    Raises:
        UnequalError: it differs.
        CauseError: it cannot be resumed.
    """
    recipe = scene.inputs.recipe(scene.name, flavour, **sections)
    newest = max(saved_steps(recipe.run.folder), default=0)
    status, error = ForkedCommand(recipe, "--resume", "auto", ranks=ranks or FLAVOURS[flavour].ranks).end()
    if status != 0:
        raise CauseError(f"the resumed job ended with {status}:\n{error[-3000:]}")
    # Ranks may take the last steps before they notice that their launcher is gone; the export may lack files then.
    is_done = f"all {newest} steps are done" in error
    if not is_done and f"from_step={newest} " not in error:
        raise CauseError(f"it did not go on from step {newest}:\n{error[:3000]}")
    scene.inputs.check_equal(recipe.run.folder, flavour)
    if is_done:
        return f"had done all {newest} steps"
    return f"went on from step {newest}" + (f" on {ranks} ranks" if ranks else "")


def train_until(step: int, flavour: str, scene: Scene) -> None:
    """The run's first steps; it is stopped by a file, as a user does it."""
    moment = Moment("recording", 0, step)
    job = start_forked(scene, flavour, moment=moment)
    reach(job, moment)
    (job.folder / "save_quit").touch()
    # Rank 0 looks once a second, in which a job may take all its steps.
    time.sleep(1)
    go_on(job)
    status, error = job.end()
    assert status == 75, error

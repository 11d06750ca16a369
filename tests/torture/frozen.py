"""Ranks that are frozen (SIGSTOP), and ranks that live but stand still."""

import re
import signal
import time
from dataclasses import dataclass
from functools import partial

import psutil
from kit.jobs import HangError
from kit.moments import Moment
from torture.cases import LINGERS, SOON, Case, Scene, check_kept, check_plain, finish, go_on, reach, start_forked
from torture.findings import CauseError

PATIENCE = 8.0
"""run.patience, as it is where a recipe does not say it."""
LIMIT = 1.0
"""run.stuck_after; ten times as long outside of steps."""
GRACE = 15.0
"""How much later than the limit a rank that stands still may be named."""
STUCK_WORKER = """
if rank == 1:
    from unittest import mock
    from diffusionpipe.trainer.data.batches import loader
    from diffusionpipe.trainer.data.batches.workers import DataWorkers
    from kit.worker_batches import StuckAt
    mock.patch.object(loader, "DataWorkers", lambda make, *others: DataWorkers(StuckAt(make, 3), *others)).start()
"""


@dataclass(frozen=True)
class Freeze:
    """A rank that is stopped while one rank is at a moment."""

    at: Moment
    rank: int
    flavour: str = "stages"

    @property
    def what(self) -> str:
        return f"rank {self.rank} frozen at rank {self.at.rank}: {self.at.place}, {self.flavour}"


FREEZES = (
    Freeze(Moment("reading the model", 1), 1),
    Freeze(Moment("measuring", 0, 4), 1, "searched"),
    Freeze(Moment("a step", 1, 5), 1),
    Freeze(Moment("a step", 0, 7), 0, "three"),
    Freeze(Moment("the sum", 1, 6), 1, "sharded"),
    Freeze(Moment("writing tensors", 0, 2), 0),
    Freeze(Moment("publishing", 0, 2), 1),
    Freeze(Moment("a validation batch", 2, 2), 2, "three"),
    Freeze(Moment("a drawing step", 1), 1),
    Freeze(Moment("exporting", 0), 1),
    Freeze(Moment("writing the export", 0), 0),
)


@dataclass(frozen=True)
class Still:
    """A rank that lives and stays at a moment."""

    at: Moment
    limit: float
    flavour: str = "stages"
    where: str = ""
    """What is said of its place."""

    @property
    def what(self) -> str:
        return f"rank {self.at.rank} stands still at {self.at.place}, {self.flavour}"


STILLS = (
    Still(Moment("a backward", 1, 7), LIMIT, where="backward of stage 1"),
    Still(Moment("a step", 0, 5), LIMIT, "three", where="step 5"),
    Still(Moment("the sum", 1, 6), LIMIT, "sharded", where="step 6"),
    Still(Moment("reading the data", 0), 10 * LIMIT, "three"),
    Still(Moment("measuring", 1, 4), 10 * LIMIT, "searched"),
    Still(Moment("writing tensors", 1), 10 * LIMIT),
    Still(Moment("a drawing step", 0), 10 * LIMIT),
    Still(Moment("exporting", 0), 10 * LIMIT),
)


def cases() -> list[Case]:
    """All of them."""
    return [
        *(Case("frozen", freeze.what, partial(_freeze, freeze)) for freeze in FREEZES),
        Case("frozen", "the launcher frozen at a step, stages", _freeze_the_launcher),
        Case("frozen", "everything frozen for twice the patience, then woken, stages", _pause_all, kills=0),
        *(Case("stuck", still.what, partial(_stand_still, still)) for still in STILLS),
        Case("stuck", "a data worker of rank 1 stands still, workers", _stick_a_worker),
    ]


def _freeze(freeze: Freeze, scene: Scene) -> str:
    job = start_forked(scene, freeze.flavour, moment=freeze.at)
    try:
        before = reach(job, freeze.at)
        job.rank(freeze.rank).send_signal(signal.SIGSTOP)
        go_on(job)
        status, error = job.end(PATIENCE + SOON)
    finally:
        job.kill_all()
    check_plain(error)
    named = re.search(r"^error: (rank (\d+)\b.*)", error, flags=re.MULTILINE)
    if status != 1 or named is None or int(named[2]) != freeze.rank:
        raise CauseError(f"status {status} instead of 1 and the name of rank {freeze.rank}:\n{error[-2000:]}")
    if "frozen" not in named[1] or "memory" in named[1]:
        raise CauseError(f"nothing of a frozen rank:\n{error[-2000:]}")
    check_kept(before, job.folder)
    return f"ended after {job.took:.0f} s, {finish(scene, freeze.flavour)}"


def _freeze_the_launcher(scene: Scene) -> str:
    at = Moment("a step", 1, 6)
    job = start_forked(scene, "stages", moment=at)
    try:
        reach(job, at)
        ranks = [job.rank(number) for number in range(2)]
        job.send(signal.SIGSTOP)
        go_on(job)
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE + LINGERS)
        living = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        job.send(signal.SIGCONT)
        if living:
            raise HangError(f"ranks live on although their launcher is frozen: {living}")
        status, error = job.end(SOON)
    finally:
        job.kill_all()
    check_plain(error)
    if status != 1 or "the launcher" not in error:
        raise CauseError(f"status {status}:\n{error[-2000:]}")
    return finish(scene, "stages")


def _pause_all(scene: Scene) -> str:
    at = Moment("a step", 1, 6)
    job = start_forked(scene, "stages", moment=at)
    try:
        reach(job, at)
        processes = job.processes()
        for process in processes:
            process.suspend()
        time.sleep(2 * PATIENCE)
        for process in processes:
            process.resume()
        go_on(job)
        status, error = job.end()
    finally:
        job.kill_all()
    if status != 0:
        raise CauseError(f"status {status}:\n{error[-2000:]}")
    scene.inputs.check_equal(job.folder, "stages")
    return "went on and finished"


def _stand_still(still: Still, scene: Scene) -> str:
    job = start_forked(scene, still.flavour, moment=still.at, run={"stuck_after": LIMIT})
    try:
        before = reach(job, still.at)
        started = time.monotonic()
        status, error = job.end(still.limit + GRACE)
        took = time.monotonic() - started
    finally:
        job.kill_all()
    ranks = range(3 if still.flavour == "three" else 2)
    _check_named(job.folder, status, error, still.at.rank, still.where, "moments.py", ranks)
    check_kept(before, job.folder)
    return f"named after {took:.0f} s, {finish(scene, still.flavour)}"


def _stick_a_worker(scene: Scene) -> str:
    job = start_forked(scene, "workers", patches=STUCK_WORKER, run={"stuck_after": LIMIT})
    try:
        job.await_step(2)  # a step is reported while the next is under way
        status, error = job.end(LIMIT + GRACE)
    finally:
        job.kill_all()
    _check_named(job.folder, status, error, 1, "waiting for its data worker", "worker_batches.py", range(2))
    return finish(scene, "workers")


def _check_named(folder, status, error, rank, where, frame, ranks) -> None:
    check_plain(error)
    named = re.search(r"^error: rank (\d+) .* has made no progress for [\d.]+ s: (.*)$", error, flags=re.MULTILINE)
    if status != 1 or named is None or int(named[1]) != rank or where not in named[2]:
        raise CauseError(f"status {status} instead of 1 and rank {rank} at {where!r}:\n{error[-2000:]}")
    missing = [other for other in ranks if not (folder / "logs" / f"rank_{other}.stacks").is_file()]
    if missing or frame not in (folder / "logs" / f"rank_{rank}.stacks").read_text():
        raise CauseError(f"no stacks of ranks {missing}, or not where rank {rank} stands")

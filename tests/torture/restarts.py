"""Jobs that are killed again and again and must end by themselves, with the losses of an uninterrupted run."""

import signal
import time
from contextlib import suppress
from functools import partial

import psutil
from kit.forked_jobs import ForkedCommand
from kit.jobs import PATIENCE, TORCHRUN, Command, Job
from kit.moments import Moment
from kit.tiny_runs import losses_of
from torture.cases import Case, Scene, check_plain, finish, go_on, reach, start_forked
from torture.findings import CauseError

KILLS = 5
ALWAYS = ("--resume", "auto", "--max-restarts", "10")


def cases() -> list[Case]:
    """All of them."""
    return [
        Case("restarts", "five random kills, own restarts, long", partial(_own, "long"), kills=KILLS),
        Case("restarts", "five random kills, own restarts, long sharded", partial(_own, "long sharded"), kills=KILLS),
        Case("restarts", "five random kills, own restarts, real processes, long", _own_real, kills=KILLS),
        Case("restarts", "a frozen rank, own restarts, stages", _frozen),
        Case("restarts", "SIGTERM in the pause before a restart, stages", _terminated_in_pause, kills=2),
        Case("restarts", "three kills, torchrun --max-restarts 3, real processes, long", _torchrun, kills=3),
        Case("restarts", "a rank that is killed at every start ends the job, stages", _fruitless, kills=3),
    ]


def _own(flavour: str, scene: Scene) -> str:
    return _kill_at_random(scene, ForkedCommand(scene.inputs.recipe(scene.name, flavour), *ALWAYS), flavour)


def _own_real(scene: Scene) -> str:
    return _kill_at_random(scene, Command(scene.inputs.recipe(scene.name, "long"), *ALWAYS), "long")


def _kill_at_random(scene: Scene, job: Job, flavour: str) -> str:
    """By turns after some new steps, and while the ranks start or a checkpoint is written."""
    try:
        where, reached = [], 0  # how far it ever was: a restart takes the steps after its checkpoint out of the metrics
        for number in range(KILLS):
            reached = max(reached, *losses_of(job.folder), 0)
            where.append(_kill_one(scene, job, None if number % 2 == 1 else reached + scene.random.randint(1, 4)))
        status, error = job.end(2 * PATIENCE)
    finally:
        job.kill_all()
    check_plain(error)
    lines = [line for line in error.splitlines() if " restart=" in line]
    if status != 0 or len(lines) != KILLS:
        raise CauseError(f"status {status} after {len(lines)} restarts:\n{error[-3000:]}")
    for victim, line in zip(where, lines, strict=True):
        if f"rank {victim} " not in line or ("SIGKILL" not in line and "died" not in line):
            raise CauseError(f"rank {victim} was killed, but: {line}")
    scene.inputs.check_equal(job.folder, flavour)
    return f"{KILLS} restarts, ended by itself"


def _kill_one(scene: Scene, job: Job, step: int | None) -> int:
    """Kill a random rank after this step, None: while it starts or soon after; its number."""
    if step is not None:
        job.await_step(step)
    ranks = [job.rank(rank, waits=True) for rank in range(2)]
    if step is None:
        time.sleep(2 * scene.random.random())
    victim = scene.random.randrange(2)
    with suppress(psutil.NoSuchProcess):
        ranks[victim].send_signal(signal.SIGKILL)
    _await_end(ranks)
    return victim


def _await_end(processes: list[psutil.Process]) -> None:
    """Wait until they have ended; a zombie has."""
    deadline = time.monotonic() + 60
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"{process} lives on"
                time.sleep(0.02)


def once(at: Moment, flavour: str, scene: Scene) -> str:
    """Kill rank 1 while a rank is at a moment; the job restarts and ends by itself."""
    job = start_forked(scene, flavour, *ALWAYS, moment=at)
    try:
        reach(job, at)
        job.rank(1).send_signal(signal.SIGKILL)
        go_on(job)
        status, error = job.end()
    finally:
        job.kill_all()
    check_plain(error)
    if status != 0 or error.count(" restart=1 ") != 1:
        raise CauseError(f"status {status}:\n{error[-2000:]}")
    scene.inputs.check_equal(job.folder, flavour)
    return "restarted once, ended by itself"


def _frozen(scene: Scene) -> str:
    at = Moment("a step", 1, 6)
    job = start_forked(scene, "stages", *ALWAYS, moment=at)
    try:
        reach(job, at)
        job.rank(1).send_signal(signal.SIGSTOP)
        go_on(job)
        status, error = job.end()
    finally:
        job.kill_all()
    check_plain(error)
    (line,) = (line for line in error.splitlines() if " restart=" in line)
    if status != 0 or "rank 1" not in line or "frozen" not in line:
        raise CauseError(f"status {status}: {line}")
    scene.inputs.check_equal(job.folder, "stages")
    return "restarted once, ended by itself"


def _terminated_in_pause(scene: Scene) -> str:
    at = Moment("a step", 1, 6)
    job = start_forked(scene, "stages", *ALWAYS, moment=at)
    try:
        reach(job, at)
        job.rank(1).send_signal(signal.SIGKILL)
        go_on(job)
        job.await_words(" restart=1 ")
        job.send(signal.SIGTERM)
        status, error = job.end()
    finally:
        job.kill_all()
    check_plain(error)
    if status != 143:
        raise CauseError(f"status {status} instead of 143:\n{error[-2000:]}")
    return finish(scene, "stages")


def _torchrun(scene: Scene) -> str:
    job = Command(scene.inputs.recipe(scene.name, "long"), launcher=TORCHRUN)
    try:
        for _ in range(3):
            _kill_one(scene, job, max(losses_of(job.folder), default=0) + scene.random.randint(1, 4))
        status, error = job.end(2 * PATIENCE)
    finally:
        job.kill_all()
    if status != 0 or "restarted=3 resume=auto" not in error:
        raise CauseError(f"status {status}:\n{error[-3000:]}")
    scene.inputs.check_equal(job.folder, "long")
    return "3 restarts, ended by itself"


def _fruitless(scene: Scene) -> str:
    """Restarts that bring nothing end the job instead of going on for ever."""
    job = start_forked(scene, "stages", *ALWAYS)
    try:
        for _ in range(3):
            rank = job.rank(1, waits=True)
            rank.send_signal(signal.SIGKILL)
            _await_end([rank])
        status, error = job.end()
    finally:
        job.kill_all()
    check_plain(error)
    if status != 1 or "last 2 restarts brought neither" not in error:
        raise CauseError(f"status {status}:\n{error[-2000:]}")
    return finish(scene, "stages")

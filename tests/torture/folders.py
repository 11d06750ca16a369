"""Two jobs in one run folder."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kit.forked_jobs import ForkedCommand
from kit.moments import Moment
from torture.cases import LINGERS, Case, Scene, check_plain, go_on, reach, start_forked
from torture.findings import CauseError, LostError

REFUSED = 2
SECOND = ((), ("--resume", "auto"), ("--resume", "latest", "--take-over"))
"""Options of a second job."""


def cases() -> list[Case]:
    """All of them."""
    return [
        *(Case("two jobs", " ".join(["a second train", *words]), partial(_second, words), kills=0) for words in SECOND),
        Case("two jobs", "both started at once", _race, kills=0),
        Case("two jobs", "the launcher killed, the same command at once", _at_once),
        Case("two jobs", "a lock of a dead job on another machine, --take-over", _take_over, kills=0),
    ]  # fmt: skip


def _second(words: Sequence[str], scene: Scene) -> str:
    return second("stages", Moment("a step", 1, 6), scene, *words)


def second(flavour: str, at: Moment, scene: Scene, *words: str) -> str:
    """Start a second job while the first is at a moment."""
    first = start_forked(scene, flavour, moment=at)
    try:
        reach(first, at)
        before = _contents(first.folder)
        other = start_forked(scene, flavour, *words)
        try:
            status, error = other.end(30)
        finally:
            other.kill_all()
        check_plain(error)
        if status != REFUSED or f"process {first.pid} on " not in error:
            raise CauseError(f"the second ended with {status}:\n{error[-2000:]}")
        if _contents(first.folder) != before:
            raise LostError("the second job has changed files of the first")
        go_on(first)
        status, error = first.end()
    finally:
        first.kill_all()
    if status != 0:
        raise CauseError(f"the first ended with {status}:\n{error[-2000:]}")
    scene.inputs.check_equal(first.folder, flavour)
    return "the second is refused, the first finishes"


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "rank_1.err"
    }


def _race(scene: Scene) -> str:
    jobs = [start_forked(scene, "stages", "--resume", "auto") for _ in range(2)]
    try:
        ends = [job.end() for job in jobs]
    finally:
        for job in jobs:
            job.kill_all()
    statuses = sorted(status for status, _ in ends)
    if statuses != [0, REFUSED]:
        raise CauseError(f"they ended with {statuses}:\n" + "\n".join(error[-1500:] for _, error in ends))
    scene.inputs.check_equal(jobs[0].folder, "stages")
    return "one is refused, the other finishes"


def _at_once(scene: Scene) -> str:
    """The ranks of the first still live when the second starts; it waits for their end."""
    at = Moment("a step", 1, 6)
    first = start_forked(scene, "stages", moment=at)
    second: ForkedCommand | None = None
    try:
        reach(first, at)
        first.send(signal.SIGKILL)
        go_on(first)
        second = start_forked(scene, "stages", "--resume", "auto")
        first.end(LINGERS, lingers=LINGERS)
        status, error = second.end()
    finally:
        first.kill_all()
        if second is not None:
            second.kill_all()
    check_plain(error)
    if status != 0:
        raise CauseError(f"the second ended with {status}:\n{error[-2000:]}")
    scene.inputs.check_equal(first.folder, "stages")
    return "the second waits, then finishes"


def _take_over(scene: Scene) -> str:
    folder = scene.inputs.folder / scene.name
    folder.mkdir()
    lock, started = folder / "run.lock", time.time() - 3600
    lock.write_text(json.dumps({"host": "node7", "pid": 1, "machine": "other/1", "started": started}))
    os.utime(lock, (started, started))
    job = start_forked(scene, "stages", "--resume", "auto")
    status, error = job.end(60)
    if status != REFUSED or re.search(r"on node7.*--take-over", error, flags=re.DOTALL) is None:
        raise CauseError(f"without --take-over: status {status}:\n{error[-2000:]}")
    job = start_forked(scene, "stages", "--resume", "auto", "--take-over")
    status, error = job.end(240)
    if status != 0:
        raise CauseError(f"with --take-over: status {status}:\n{error[-2000:]}")
    scene.inputs.check_equal(folder, "stages")
    return "refused, then taken over"

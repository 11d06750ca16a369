"""`make soak`: a real job of two ranks for 20 minutes; what its processes hold must not grow after the first two."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from kit.tiny_runs import losses_of
from soak.job import WARM_UP, Job
from soak.readings import Reading, Span, growth, head, read, shared_bytes

from diffusionpipe.trainer.checkpoints.checkpoint import latest, verify

STARTED: float = 300.0
"""Seconds in which the first steps must be done."""


def await_steps(job: Job, steps: int) -> None:
    """Wait until so many steps are done."""
    deadline = time.monotonic() + STARTED
    while job.is_running and time.monotonic() < deadline:
        if max(losses_of(job.recipe.run.folder), default=0) >= steps:
            return
        time.sleep(0.5)
    raise SystemExit(f"no step {steps}:\n{job.log.read_text()[-2000:]}")


def watch(job: Job, start: float, seconds: float, pause: float = 0.5) -> Span:
    """Read the job for a while."""
    end = time.monotonic() + seconds
    readings: dict[str, list[Reading]] = {}
    shared = []
    while time.monotonic() < end and job.is_running:
        processes = job.processes()
        for name, reading in read(processes).items():
            readings.setdefault(name, []).append(reading)
        shared.append(shared_bytes([process.pid for process in processes.values()]))
        time.sleep(pause)
    return Span(start, readings, shared)


def soak(folder: Path, *, warm_up: float, seconds: float, spans: int) -> list[str]:
    """Run the job, print a table, and return what has grown or gone wrong."""
    job = Job(folder)
    try:
        await_steps(job, 1)
        time.sleep(warm_up)
        await_steps(job, WARM_UP)  # which two minutes on a busy machine are too short for
        print(head(), flush=True)
        found: list[Span] = []
        for number in range(spans):
            found.append(watch(job, warm_up + number * seconds / spans, seconds / spans))
            print("\n".join(found[-1].rows()), flush=True)
        was_running = job.is_running
    finally:
        status = job.end()
    problems = growth(found) if was_running else []
    if not was_running or status != 75:
        problems.append(f"the job ended with status {status}: {job.log.read_text()[-2000:]}")
    else:
        checkpoint = latest(job.recipe.run.folder)
        assert checkpoint is not None
        verify(checkpoint)
    saved = job.log.read_text().count(" checkpoint=")
    print(f"{max(losses_of(job.recipe.run.folder), default=0)} steps, {saved} checkpoints, exit status {status}")
    return problems


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the whole job")
    minutes = parser.parse_args().minutes
    warm_up = min(120.0, 6 * minutes)
    seconds = 60 * minutes - warm_up
    with tempfile.TemporaryDirectory() as folder:
        problems = soak(Path(folder), warm_up=warm_up, seconds=seconds, spans=max(2, round(seconds / 120)))
    for problem in problems:
        print(f"grew: {problem}")
    print("nothing has grown" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

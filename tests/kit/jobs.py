"""Trainings started by the command, to which something happens while they run, and what they leave behind.

Every process of a job has the job's folder as its working directory, so none can hide: `Job.processes` finds them all.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from kit.tiny_runs import losses_of

from diffusionpipe.trainer.recipe import Recipe, recipe_to_toml

PATIENCE = 240.0
"""Seconds until a job must have come to its steps; only waited for where something is wrong."""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3")


class HangError(AssertionError):
    """A job has not ended in time."""


class StrayError(AssertionError):
    """A process has outlived its job."""


class Job:
    """A running `diffusionpipe train`; subclasses start it."""

    def __init__(self, recipe: Recipe, words: Sequence[str], ranks: int | None) -> None:
        """`ranks`: None under torchrun."""
        self.recipe, self.folder = recipe, Path(recipe.run.folder)
        self.place = _next_place(self.folder)
        (self.place / "recipe.toml").write_text(recipe_to_toml(recipe))
        self.arguments = ["train", str(self.place / "recipe.toml"), "--device", "cpu", "--no-cache", *words]
        self.arguments += [] if ranks is None else ["--ranks", str(ranks)]
        self.started = time.monotonic()

    pid: int
    """Of the launcher."""
    took: float
    """Seconds that the job still took to its end, with all of its processes, when its end was awaited."""

    def poll(self) -> int | None:
        """The exit status of the launcher; None while it runs."""
        raise NotImplementedError

    def rank_now(self, number: int) -> psutil.Process | None:
        """The process of a rank; None between two starts."""
        raise NotImplementedError

    def said(self, stream: str = "err") -> str:
        """What launcher and rank 0 have written so far."""
        return (self.place / stream).read_text(encoding="utf-8", errors="replace")

    def send(self, number: int) -> None:
        """A signal to the launcher."""
        os.kill(self.pid, number)

    def rank(self, number: int, *, waits: bool = False) -> psutil.Process:
        """The process of a rank; `waits`: also if the job is just starting or between two starts."""
        deadline = time.monotonic() + (PATIENCE if waits else 0)
        while (found := self.rank_now(number)) is None:
            assert time.monotonic() < deadline, f"no rank {number}"
            time.sleep(0.02)
        return found

    def await_event(self, has_happened: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Wait for something that the job does."""
        deadline = time.monotonic() + seconds
        while not has_happened():
            ended = self.poll()
            assert ended is None, f"ended with {ended} before {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"too slow to come to {what}:\n{self.said()}"
            time.sleep(0.005)

    def await_step(self, step: int) -> None:
        """Wait until the step is in the metrics."""
        self.await_event(lambda: max(losses_of(self.folder), default=0) >= step, f"step {step}")

    def await_words(self, words: str) -> None:
        """Wait until launcher or rank 0 have said this."""
        self.await_event(lambda: words in self.said(), repr(words))

    def processes(self) -> list[psutil.Process]:
        """All that live: launcher, ranks and what they have started."""
        return list(processes_in(self.place))

    def end(self, seconds: float = PATIENCE, *, lingers: float = 5.0) -> tuple[int, str]:
        """Status and standard error, once the job has ended with every process that it started.

        `lingers`: how long these may live after the launcher.

        Raises:
            HangError: the launcher does not end in time.
            StrayError: another process does not.
        """
        started = time.monotonic()
        deadline = started + seconds
        try:
            while (status := self.poll()) is None:
                if time.monotonic() > deadline:
                    raise HangError(f"hangs for {seconds:.0f} s:\n{self.said()}")
                time.sleep(0.02)
            deadline = time.monotonic() + lingers
            while alive := self.processes():
                if time.monotonic() > deadline:
                    raise StrayError(f"still there: {alive}\n{self.said()}")
                time.sleep(0.02)
            self.took = time.monotonic() - started
        finally:
            self.kill_all()
        return status, self.said()

    def kill_all(self) -> None:
        """So that nothing outlives a test."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


class Command(Job):
    """`python -m diffusionpipe train` with a recipe: what a user starts."""

    def __init__(
        self,
        recipe: Recipe,
        *words: str,
        ranks: int = 2,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        around: Sequence[str] = (),
    ) -> None:
        """`launcher`: python's words that start the ranks instead of our own; `around`: a program to start it with."""
        super().__init__(recipe, words, None if launcher else ranks)
        with (self.place / "out").open("w") as out, (self.place / "err").open("w") as err:
            self.process = subprocess.Popen(
                [*around, sys.executable, *launcher, "-m", "diffusionpipe", *self.arguments],
                stdout=out,
                stderr=err,
                cwd=self.place,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def rank_now(self, number: int) -> psutil.Process | None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.environ().get("RANK") == str(number) and "diffusionpipe" in process.cmdline():
                    return process
        return None


def processes_in(place: Path) -> Iterator[psutil.Process]:
    """Those with this working directory."""
    for pid in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):
            if os.readlink(f"/proc/{pid}/cwd") == str(place):
                yield psutil.Process(pid)


def _next_place(run_folder: Path) -> Path:
    """A new folder for one job of a run."""
    number = 0
    while (place := run_folder.with_name(f"{run_folder.name}.job-{number}")).exists():
        number += 1
    place.mkdir(parents=True)
    return place.resolve()

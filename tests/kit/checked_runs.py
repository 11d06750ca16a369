"""Runs that hold their first steps against their prediction, on one rank of a job."""

import io
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from unittest import mock

from kit.tiny_runs import train
from rich.console import Console

from diffusionpipe.cli.text.check_text import ConsoleReport
from diffusionpipe.cli.text.run_text import ConsoleWords
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.machine_use import CorePlace, Counters
from diffusionpipe.trainer.course import counted_steps, first_steps
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.workflows.training.run_check import Command, RunCheck
from diffusionpipe.workflows.training.run_report import RunReport

LOG = "log.txt"


class Recorded:
    """Counters of two ranks' machine of two cores, 10 s between two readings. Mutable: time goes on."""

    def __init__(self, others: float) -> None:
        """`others`: the part of the cores that other programs use while this rank uses half a core."""
        self._unused, self._reads = 2 - 1.0 - 2 * others, 0

    def read(self, cores: Sequence[int]) -> Counters:
        """What `runtime.machine.machine_use.read_counters` returns."""
        self._reads += 1
        now = 10.0 * self._reads
        return Counters(clock=now, unused=self._unused * now, own=0.4 * now, helpers=0.1 * now)


def two_cores(threads: int) -> CorePlace:
    """The machine of `Recorded`."""
    return CorePlace(machine="a", cores=(0, 1), threads=threads, helpers=0)


def train_checked(job: Job, recipe: Recipe, others: float = 0.0) -> int:
    """The run of a recipe whose steps 2 to 4 are recorded; what rank 0 logs is in the run's folder.

    `others`: what other programs use of the cores, whatever they do in truth.
    """
    console, log = Console(file=io.StringIO()), io.StringIO()
    check = RunCheck(
        ConsoleReport(console), Command(recipe=Path("recipe.toml"), overrides=(), ranks=job.membership.world_size)
    )
    report = RunReport(ConsoleWords(console), job.membership.rank, check)
    machine = {"read_counters": Recorded(others).read, "place_of": two_cores}
    with (
        mock.patch.multiple(first_steps, WARM_UP=1, COUNTED=3, **machine),
        mock.patch.object(counted_steps, "ENOUGH", 3),
        logged_to(log),
    ):
        steps = train(job, recipe, check=check, announce=report.start)
        if job.membership.rank == 0:
            report.end()
    if job.membership.rank == 0:
        (recipe.run.folder / LOG).write_text(log.getvalue(), encoding="utf-8")
    return steps


@contextmanager
def logged_to(file: TextIO) -> Iterator[None]:
    """What this process logs is written there meanwhile."""
    package, handler = logging.getLogger("diffusionpipe"), logging.StreamHandler(file)
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


MOMENTS, PARTS = ("step", "elapsed_s", "prediction_checked_after"), ("stage", "on_ranks")
"""Keys of lines that speak of a moment, and of a part."""


def values_of_keys(log: str) -> dict[str, set[str]]:
    """All values of each key in a run's log; in lines about a part they are values of "key of part=number"."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in log.splitlines():
        pairs = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line))
        if not any(moment in pairs for moment in MOMENTS):
            part = next((f" of {key}={pairs[key]}" for key in PARTS if key in pairs), "")
            for key, value in pairs.items():
                found[key if key in PARTS else key + part].add(value)
    return found

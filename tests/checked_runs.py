"""Runs that hold their first steps against their prediction, on one rank of a job."""

import io
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from rich.console import Console
from tiny_runs import train

from diffusionpipe.cli.run_check import Command, RunCheck
from diffusionpipe.runtime.machine_use import Counters, Place
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.trainer import first_steps
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.units import Seconds

SHOWN = "shown.txt"


class Recorded:
    """Counters of two ranks' machine of two cores, 10 s between two readings. Mutable: time goes on."""

    def __init__(self, others: float) -> None:
        """`others`: the part of the cores that other programs use while this rank uses half a core."""
        self._unused, self._reads = 2 - 1.0 - 2 * others, 0

    def read(self, cores: Sequence[int], clock: Seconds) -> Counters:
        """What `runtime.machine_use.read_counters` returns."""
        self._reads += 1
        now = 10.0 * self._reads
        return Counters(clock=now, unused=self._unused * now, own=0.4 * now, helpers=0.1 * now)


def two_cores(threads: int) -> Place:
    """The machine of `Recorded`."""
    return Place(machine="a", cores=(0, 1), threads=threads)


def train_checked(job: Job, recipe: Recipe, others: float = 0.0) -> int:
    """The run of a recipe whose steps 2 to 4 are recorded; what a terminal shows of them is in the run's folder.

    `others`: what other programs use of the cores, whatever they do in truth.
    """
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    check = RunCheck(console, Command(recipe=Path("recipe.toml"), overrides=(), ranks=job.membership.world_size))
    with mock.patch.multiple(
        first_steps, WARM_UP=1, COUNTED=3, read_counters=Recorded(others).read, place_of=two_cores
    ):
        steps = train(job, recipe, check=check)
    if job.membership.rank == 0:
        (recipe.run.folder / SHOWN).write_text(console.file.getvalue(), encoding="utf-8")
    return steps

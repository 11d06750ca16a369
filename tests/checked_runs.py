"""Runs that hold their first steps against their prediction, on one rank of a job."""

import io
from pathlib import Path
from unittest import mock

from rich.console import Console
from tiny_runs import train

from diffusionpipe.cli.run_check import Command, RunCheck
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.trainer import first_steps
from diffusionpipe.trainer.recipe import Recipe

SHOWN = "shown.txt"


def train_checked(job: Job, recipe: Recipe) -> int:
    """The run of a recipe whose steps 2 to 4 are recorded; what a terminal shows of them is in the run's folder."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    check = RunCheck(console, Command(recipe=Path("recipe.toml"), overrides=(), ranks=job.membership.world_size))
    with mock.patch.multiple(first_steps, WARM_UP=1, COUNTED=3):
        steps = train(job, recipe, check=check)
    if job.membership.rank == 0:
        (recipe.run.folder / SHOWN).write_text(console.file.getvalue(), encoding="utf-8")
    return steps

"""Runs of two ranks, one of which is killed again and again."""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from kit.crew import crew_of
from kit.descriptions import described
from kit.moments import Moment
from kit.tiny_runs import kill, losses_of, tensors_of, train

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.files import write_profile
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.model import members
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.setup.job_profile import PROFILE
from diffusionpipe.workflows.training.expectation import unmeasured

RANKS = 2


def train_until_killed(job: Job, recipe: Recipe, resume: str | None, moment: Moment) -> int:
    """The run of a recipe, in which one rank is killed at a moment."""
    if job.membership.rank == moment.rank:
        moment.watch(lambda: kill(job, recipe))
    return train(job, recipe, resume)


def train_whole(recipe: Recipe, resume: str | None = None) -> None:
    """The run of a recipe to its end. In a nest."""
    warm(recipe)
    _finish(recipe, resume)


def warm(recipe: Recipe) -> None:
    """Fill torch's caches of fake operations, and keep a profile for a run with fills."""
    with mock.patch.object(members, "describe", described):
        opened = members.build_model(recipe, "cpu")
    if recipe.pipeline.fill:
        _keep_equal_profile(recipe, opened.model)


def _keep_equal_profile(recipe: Recipe, model: ModelGraph) -> None:
    """Have all layers take equally long, so that every run has the same fills, and each rank has some."""
    torch.set_num_threads(1)  # as the ranks do; the name of the device says so
    profile = replace(unmeasured(model, recipe.training.precision.value), device=device_name(torch.device("cpu")))
    recipe.run.folder.mkdir(parents=True, exist_ok=True)
    write_profile(profile, recipe.run.folder / PROFILE)


def _finish(recipe: Recipe, resume: str | None = None) -> None:
    with crew_of(RANKS, is_forked=True) as crew:
        assert crew.run(train, recipe, resume) == [recipe.training.steps] * RANKS


def train_with_kills(recipe: Recipe, moments: Sequence[Moment]) -> None:
    """The run of a recipe with a kill at each of these moments, all before a second checkpoint. In a nest."""
    warm(recipe)
    resume, saved = None, 0
    for moment in moments:
        with crew_of(RANKS, is_forked=True) as crew, pytest.raises((EOFError, ConnectionResetError)):
            crew.run(train_until_killed, recipe, resume, moment)
        reached = step_of(recipe)
        assert reached in (saved, saved + recipe.checkpoint.every), moment
        saved, resume = reached, "latest" if reached else None
    _finish(recipe, resume)


def step_of(recipe: Recipe) -> int:
    """The step of the run's last checkpoint; 0 without one."""
    path = latest(recipe.run.folder)
    return int(path.name.removeprefix("step-")) if path else 0


def assert_same_bits(found: Recipe, expected: Recipe) -> None:
    """Weights, average, optimizer and metrics of two runs."""
    a, b = (tensors_of(latest(recipe.run.folder)) for recipe in (found, expected))
    assert {name.partition(".")[0] for name in b} == {"model", "ema", "optimizer"}
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    for key in ("loss", "gradient_norm", "validation_loss"):
        own, other = losses_of(found.run.folder, key), losses_of(expected.run.folder, key)
        assert own == other
        assert own

"""The loss that a run reached and its gradient noise scale, read from its folder for `plan --quality`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.quality import ReachedLoss
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.workflows.planning.question import PlanQuestion


def reached_by(folder: Path) -> ReachedLoss:
    """The batch and the steps with which the run in this folder reached its loss, and its gradient noise scale.

    Raises:
        ConfigError: the folder is not a run, or the run has no noise scale or too few measurements.
    """
    from diffusionpipe.costs.noise import LEAST_MEASUREMENTS, measurements_of, noise_scale
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choosing.quality import ReachedLoss
    from diffusionpipe.trainer.reporting.metrics import read_metrics

    recipe = _recipe_of(folder)
    rows = read_metrics(folder)
    steps = max((int(row["step"] or 0) for row in rows if row.get("loss") is not None), default=0)
    measured = measurements_of(rows)
    scale = noise_scale(measured)
    if scale is not None:
        return ReachedLoss(batch=recipe.training.batch, steps=steps, scale=scale)
    every = recipe.training.noise_scale_every
    if measured:
        why = f"{len(measured)} measurements" + (
            f", and {LEAST_MEASUREMENTS} are needed; train on: there is one every {every} steps"
            if len(measured) < LEAST_MEASUREMENTS
            else " are too noisy: their mean is not above 0; train on, or with a larger batch"
        )
        raise ConfigError(f"--quality: the noise scale of {folder} is not known yet: {why}")
    raise ConfigError(f"--quality: {folder} has no noise scale: {_reason(folder, every, steps)}")


def check_same_model(folder: Path, asked: PlanQuestion) -> None:
    """Check that a run trained the model that is planned for.

    Raises:
        ConfigError: it trained other layers, another model or other adapters.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.files import read_plan

    layers = {name for block in read_plan(folder / "plan.json").blocks for name in block}
    planned, own = asked.recipe, _recipe_of(folder)
    differs = layers != {layer.name for layer in asked.setting.graph.layers}
    if planned is not None and not planned.models and not own.models:
        ways = [(one.model.path, one.model.train, one.lora.rank if one.lora else None) for one in (planned, own)]
        differs = differs or ways[0] != ways[1]
    if differs:
        raise ConfigError(
            f"--quality: {folder} trained another model or other parts of it, so its noise scale says nothing here; "
            "name a run of this model"
        )


def _recipe_of(folder: Path) -> Recipe:
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe.decided import recorded_recipe

    if not (folder / "recipe.toml").exists() or not (folder / "plan.json").exists():
        raise ConfigError(f"--quality: {folder} is not the folder of a run: it has no recipe.toml or no plan.json")
    return recorded_recipe(folder / "recipe.toml")


def _reason(folder: Path, every: int | None, steps: int) -> str:
    """The reason, as a text, why a run has no measurement of its gradient noise scale.

    `every`: its key training.noise_scale_every. `steps`: the number of its steps.
    """
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.trainer.step.noise_scale import unmeasurable

    if every is None:
        return 'training.noise_scale_every is "none"; set it to a number of steps and train on'
    why = unmeasurable(read_plan(folder / "plan.json"))
    return why or f"it has {steps} steps, or is older than these measurements; train on: there is one every {every}"

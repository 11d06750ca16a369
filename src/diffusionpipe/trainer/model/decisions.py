"""Values for keys that a recipe leaves to the machine: by the devices of a job and the run that it continues."""

import logging
from pathlib import Path

import torch

from diffusionpipe.errors import RecipeError
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.agreement import from_first, on_all
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import (
    FrozenDtype,
    PipelineSection,
    Recipe,
    RecipePrecision,
    continued,
    decided,
    recorded_recipe,
)
from diffusionpipe.trainer.recipe.schema import why_not_searched

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""The compute capability from which NVIDIA GPUs compute in bfloat16; older ones emulate it."""


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16, in which it then trains by default: a GPU of capability 8.0 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def decided_by_job(recipe: Recipe, job: Job) -> Recipe:
    """The recipe with its "auto" precision and storage of frozen weights set to types that all devices of a job have.

    Every rank calls it.

    Raises:
        RecipeError: the recipe stores weights in bfloat16, which its arithmetic would read with a loss.
    """
    if recipe.training.precision is not RecipePrecision.AUTO and recipe.model.frozen_dtype is not FrozenDtype.AUTO:
        return recipe
    own = has_bfloat16(job.device)
    # On CPUs the answer is the same everywhere.
    found = all(gather(own, form_of(bool))) if job.device.type == "cuda" else own
    return on_all(lambda: decided(recipe, has_bfloat16=found))


def decided_for_run(recipe: Recipe, job: Job, checkpoint: Path | None) -> Recipe:
    """The recipe with its "auto" precision and storage of frozen weights set, for a run.

    A run that continues from `checkpoint` takes the values that it had before, also of `activation_checkpointing`.
    Every rank calls it, and rank 0 logs what was decided.

    Raises:
        RecipeError: the recipe stores weights in bfloat16, which its arithmetic would read with a loss.
    """
    chosen = recipe
    if checkpoint is not None:
        text = from_first(lambda: _recorded(checkpoint.parent.parent / "recipe.toml"))
        if text:
            chosen = continued(recipe, Recipe.model_validate_json(text))
    chosen = decided_by_job(chosen, job)
    if job.membership.rank == 0:
        _tell(recipe, chosen, is_continued=checkpoint is not None)
    return chosen


def _recorded(path: Path) -> str:
    """The recipe in the file at `path`, as JSON; "" where there is none that this version reads."""
    try:
        return recorded_recipe(path).model_dump_json()
    except RecipeError:
        return ""


def _tell(stated: Recipe, chosen: Recipe, *, is_continued: bool) -> None:
    """Log the values that were chosen for keys that the stated recipe leaves to the machine."""
    if stated.training.precision is RecipePrecision.AUTO:
        with_or_without = "with" if chosen.training.precision is RecipePrecision.BFLOAT16 else "not all with"
        reason = "as before" if is_continued else f"devices {with_or_without} bfloat16"
        kept = chosen.model.frozen_dtype or "none"
        logger.info('precision=%s frozen_dtype=%s reason="%s"', chosen.training.precision, kept, reason)
    sections = {name: getattr(chosen, name) for name in ("models", "objective")}
    if chosen.pipeline == PipelineSection() and (why := why_not_searched(sections)):
        logger.info('plan=none reason="%s"', why)

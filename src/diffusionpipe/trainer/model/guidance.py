"""Guidance as a recipe states it: of a distilled model its embedding, of any other the classifier-free guidance."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.models.opening.pipeline_defaults import Guidance, default_guidance
from diffusionpipe.trainer.recipe import Recipe

logger = logging.getLogger(__name__)

TRAINED_GUIDANCE = 1.0
"""The guidance that a distilled model reads while it is trained: it predicts the data themselves, without guidance."""


def guidance_of(folder: Path, given: float | None, true_cfg_scale: float, *, has_negative: bool) -> Guidance:
    """The scales of guidance with which the model in a folder draws.

    Some of diffusers' pipelines guide only with a negative prompt. So do we, and log a warning where there is none.

    Args:
        folder: the diffusers folder of the model.
        given: the guidance that the user asks for; None: the default of the model's diffusers pipeline.
        true_cfg_scale: the scale of classifier-free guidance of a distilled model.
        has_negative: whether there is a negative prompt.

    Raises:
        RecipeError: `true_cfg_scale` has no effect.
    """
    wanted = _wanted(folder, given, true_cfg_scale)
    if has_negative or not wanted.is_guided or not family_of(folder).needs_negative:
        return wanted
    logger.warning(
        "guidance=%g effect=none reason=no_negative_prompt; diffusers' pipeline of this model guides only away from a "
        "negative prompt; give one, which may be the empty text",
        wanted.scale,
    )
    return replace(wanted, scale=wanted.unguided)


def _wanted(folder: Path, given: float | None, true_cfg_scale: float) -> Guidance:
    """The scales of guidance by the user's values, whether or not there is a negative prompt.

    Raises:
        RecipeError: `true_cfg_scale` has no effect.
    """
    default = default_guidance(folder)
    if default.embedded is not None:
        return Guidance(scale=true_cfg_scale, embedded=default.embedded if given is None else given)
    if true_cfg_scale != 1:
        raise RecipeError(
            f"true_cfg_scale: {true_cfg_scale:g} has no effect, because the model has no guidance embedding; its "
            "guidance is classifier-free guidance already. Set guidance instead"
        )
    return default if given is None else replace(default, scale=given)


def drawn_guidance(recipe: Recipe, folder: Path) -> Guidance:
    """The scales of guidance with which a run draws from the model in a folder.

    Raises:
        RecipeError: `sampling.true_cfg_scale` has no effect.
    """
    drawn = recipe.sampling
    return guidance_of(folder, drawn.guidance, drawn.true_cfg_scale, has_negative=bool(drawn.negatives))


def trained_guidance(recipe: Recipe) -> float:
    """The guidance that a distilled model reads while it is trained: the recipe's, or 1, which is without guidance."""
    return TRAINED_GUIDANCE if recipe.objective.guidance is None else recipe.objective.guidance


def check_guidance(recipe: Recipe, folder: Path) -> None:
    """Refuses guidance that would have no effect on the model in the folder.

    Raises:
        RecipeError: every reason is listed.
    """
    if problems := list(_problems(recipe, folder)):
        raise RecipeError("\n".join(problems))


def _problems(recipe: Recipe, folder: Path) -> Iterator[str]:
    if recipe.objective.guidance is not None and default_guidance(folder).embedded is None:
        yield (
            f"objective.guidance: {recipe.objective.guidance:g} has no effect, because the model has no guidance "
            "embedding (guidance_embeds); remove it"
        )
    try:
        drawn_guidance(recipe, folder)
    except RecipeError as error:
        yield f"sampling.{error}"

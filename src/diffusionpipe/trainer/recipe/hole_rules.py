"""Checks of the recipe of an inpainting model: the keys that such a model needs, and the keys that no other reads."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from diffusionpipe.trainer.recipe.model_folder import problem_of_masks
from diffusionpipe.trainer.recipe.model_section import ModelSection
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.sampling_section import SamplingSection

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe.schema import DataSection


def masks_fit_the_model(
    *, model: ModelSection, data: "DataSection", models: Mapping[str, MemberSection]
) -> Iterator[str]:
    """A sentence if masks are set and the model reads none, or if an inpainting model has no masks or has patches."""
    is_masked, is_placed = data.masks is not None, data.patches is not None
    problem = None if models else problem_of_masks(model.path, is_masked=is_masked, is_placed=is_placed)
    if problem is not None:
        yield problem


def drawn_holes_have_pictures(*, data: "DataSection", sampling: SamplingSection) -> Iterator[str]:
    """A sentence if the run would draw samples from pictures that its model does not read, or lacks their masks.

    Also if it lacks the pictures from which its inpainting model draws.
    """
    if sampling.every is None:
        return
    is_clip = data.frames is not None
    if data.masks is None:
        if sampling.images:
            yield "sampling.images: models that fill holes read them; remove images and masks, or set data.masks"
    elif not sampling.images:
        yield (
            "sampling.images: clips are drawn from their first frames; name a picture for all prompts, or one for each"
            if is_clip
            else "sampling.images: the model fills holes; name a picture and its mask (masks) for all prompts, or for "
            "each"
        )
    elif not sampling.masks and not is_clip:
        yield "sampling.masks: a picture without a mask has no hole to fill; name the masks of images"

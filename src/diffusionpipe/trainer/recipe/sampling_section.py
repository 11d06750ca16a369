"""[sampling] of a recipe: the pictures that a run draws while it trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.prompts import negatives_of, read_prompts
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Count,
    Maybe,
    NotNegative,
    Place,
    Section,
    Seed,
    Several,
    of_user,
    texts_for_text,
)


class SamplingSection(Section):
    """[sampling]: pictures drawn while training."""

    every: Maybe[Count] = None
    """Steps between drawings; the run also draws after the last step."""
    at_start: bool = False
    """Also draw and validate before the first step, to compare with what the model could before."""
    prompts: Several[str] = ()
    """Captions to draw, or the path of a file with one a line; for models with text."""
    negative_prompt: Annotated[Several[str], BeforeValidator(texts_for_text)] = ()
    """Things that the pictures should not show: one text for all prompts, or a list with one for each prompt; `""` is
    the empty text. Guidance steers away from it instead of from the empty caption."""
    sizes: Annotated[Several[str], BeforeValidator(texts_for_text)] = ()
    """Where `data.resolution` has several sizes: one for all pictures or one for each, e.g. `["768x512",
    "512x512"]`."""
    labels: Several[Annotated[int, Field(ge=0, lt=2**31)]] = ()
    """Classes to draw; for models with class labels."""
    images: Annotated[Several[Place], BeforeValidator(texts_for_text)] = ()
    """For a model that fills holes: the pictures whose holes are filled, one for all prompts or one for each."""
    masks: Annotated[Several[Place], BeforeValidator(texts_for_text)] = ()
    """The masks of `images`: black where a picture is known, white in the hole. Not needed for clips, whose first
    frames `images` are."""
    steps: Annotated[Count, Field(le=10_000)] = 30
    """Denoising steps."""
    guidance: Auto[NotNegative] = None
    """The guidance value that a distilled model (FLUX.1-dev) reads; for other models the scale of classifier-free
    guidance (1 turns it off). `"auto"`: the value of diffusers' pipeline."""
    true_cfg_scale: Annotated[float, Field(ge=1)] = 1.0
    """Scale of classifier-free guidance of a distilled model; 1 turns it off. An error for other models."""
    noise_level: Annotated[int, Field(ge=0, lt=1_000_000)] = 250
    """For super-resolution: the time step whose noise is added to the small pictures, below 1,000 in most models; the
    model reads it too."""
    scheduler: Maybe[str] = None
    """Class name of a diffusers scheduler, e.g. `"DDIMScheduler"`; `"none"`: the scheduler of the export."""
    seed: Maybe[Seed] = None
    """Seed of the first noise of the pictures, which is the same at every drawing; `"none"`: `training.seed`."""

    @model_validator(mode="before")
    @classmethod
    def _prompts_of_a_file(cls, values: object) -> object:
        path = values.get("prompts") if isinstance(values, Mapping) else None
        if not isinstance(values, Mapping) or not isinstance(path, str):
            return values
        try:
            found = read_prompts(Path(of_user(path)))
        except RecipeError as error:
            raise ValueError("\n".join(f"prompts: {line}" for line in str(error).splitlines())) from error
        negative = values.get("negative_prompt")
        if negative is None or isinstance(negative, str):
            negative = negatives_of(found, negative)
        elif any(prompt.negative is not None for prompt in found):
            raise ValueError(
                f"negative_prompt: {path} has its own negative prompts; remove negative_prompt, or remove them from "
                "the file"
            )
        return {**values, "prompts": [prompt.text for prompt in found], "negative_prompt": negative}

    @property
    def negatives(self) -> tuple[str, ...]:
        """A negative prompt for each prompt, one given for all repeated; () where none is given."""
        return self.negative_prompt * len(self.prompts) if len(self.negative_prompt) == 1 else self.negative_prompt

    @model_validator(mode="after")
    def _negative_prompts_have_an_effect(self) -> Self:
        if not self.negative_prompt:
            return self
        if not self.prompts:
            raise ValueError("negative_prompt: there are no prompts; remove it, or set prompts")
        if self.guidance == 1 and self.true_cfg_scale == 1:
            raise ValueError("negative_prompt: it has no effect without guidance; set guidance above 1, or remove it")
        if len(self.negatives) != len(self.prompts):
            raise ValueError(
                f"negative_prompt: {len(self.negative_prompt)} negative prompts do not match {len(self.prompts)} "
                "prompts; give one text for all, or a list with one for each prompt"
            )
        return self

    @model_validator(mode="after")
    def _pictures_with_holes_are_complete(self) -> Self:
        if len(self.masks) not in (0, len(self.images)) or len(self.images) not in (0, 1, len(self.prompts)):
            raise ValueError(
                f"masks: {len(self.images)} images and {len(self.masks)} masks do not match {len(self.prompts)} "
                "prompts; give one of each for all, or one of each for each prompt"
            )
        if self.images and self.every is None:
            raise ValueError("images: nothing is drawn; set every, or remove images and masks")
        return self

    @model_validator(mode="after")
    def _sizes_are_one_for_each(self) -> Self:
        count = len(self.prompts) or len(self.labels)
        if len(self.sizes) not in (0, 1, count):
            raise ValueError(
                f"sizes: {len(self.sizes)} do not match {count} pictures; give one for all, or one for each"
            )
        return self

    @model_validator(mode="after")
    def _has_something_to_draw(self) -> Self:
        if self.prompts and self.labels:
            raise ValueError(
                "prompts: labels are given too; keep one, prompts for a text model, labels for a class model"
            )
        if self.every and not self.prompts and not self.labels:
            raise ValueError("every: there are neither prompts nor labels; set one of them")
        return self

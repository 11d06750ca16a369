"""[model] and [lora] of a recipe: the model and the parts of it that are trained."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Count,
    Maybe,
    Positive,
    Section,
    Several,
    raise_problems,
)


class FrozenDtype(StrEnum):
    """The dtype in which frozen weights are stored where it differs from the trained ones."""

    BFLOAT16 = "bfloat16"


class ModelSection(Section):
    """[model]: the model to train."""

    path: str
    """A diffusers folder, or the id of one on the Hugging Face Hub."""
    train: Several[str] = ()
    """Components to train, e.g. ["unet"]; empty: the denoiser of the pipeline's class."""
    from_scratch: bool = False
    """Whether the trained components start from random weights, by their configuration only."""
    variant: Maybe[str] = None
    """The variant of the folder's weights that is read, e.g. "fp16" of model.fp16.safetensors; "none": the plain files,
    or the only variant."""
    components: dict[str, GroupSection] = Field(default_factory=dict)
    """Trained components with a learning rate, optimizer arguments or an average of their own, by name."""
    low_resolution: Auto[Count] = None
    """Side of the small pictures that a model of super-resolution reads; "auto": the side of the model before it."""
    noise_augmentation: Auto[Annotated[float, Field(gt=0, le=1)]] = None
    """The small pictures are noised at a random level below this share of all; "auto": 0.5."""
    frozen_dtype: Maybe[Choice[FrozenDtype]] = None
    """"bfloat16": frozen linear layers and convolutions are stored in bfloat16, with half the memory and the same
    results. "none": frozen weights have the dtype of the trained weights."""


class LoraSection(Section):
    """[lora]: low-rank adapters beside the denoiser's weights, which stay frozen."""

    rank: Maybe[Count]
    """Rank of every adapter, e.g. 16; "none" trains whole components."""
    alpha: Maybe[Positive] = None
    """The output of an adapter is scaled by alpha / rank; "none": alpha = rank."""
    target_modules: Several[str] = ()
    """Name suffixes of the layers that get an adapter; empty: attention's to_q, to_k, to_v, to_out.0."""
    merge: bool = False
    """Whether the export is the whole model with the adapters added to its weights, instead of the adapters alone."""

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> Self:
        if self.rank is None:
            others = {"alpha": self.alpha is not None, "target_modules": self.target_modules, "merge": self.merge}
            raise_problems(
                f"{key}: it has no effect without adapters; set rank, e.g. 16, or remove it"
                for key, is_given in others.items()
                if is_given
            )
        return self

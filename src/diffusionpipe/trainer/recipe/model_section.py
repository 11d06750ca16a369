"""[model], [lora] and [objective] of a recipe: what is trained, and towards what."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Count,
    Fraction,
    Maybe,
    NotNegative,
    Positive,
    Section,
    Several,
    raise_problems,
)


class ObjectiveKind(StrEnum):
    """What the denoiser predicts."""

    AUTO = "auto"
    EPSILON = "epsilon"
    V_PREDICTION = "v_prediction"
    FLOW_MATCHING = "flow_matching"


class TimeSampling(StrEnum):
    """The distribution of the training times in [0, 1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"


class FrozenDtype(StrEnum):
    """The dtype in which frozen weights are stored where it is not that of the trained ones."""

    BFLOAT16 = "bfloat16"


class ModelSection(Section):
    """[model]: the model to train."""

    path: str
    """A diffusers folder, or the id of one on the Hugging Face Hub."""
    train: Several[str] = ()
    """Components to train, e.g. ["unet"]; empty: the denoiser of the pipeline's class."""
    from_scratch: bool = False
    """Whether the trained components start from random weights, by their configuration only."""
    components: dict[str, GroupSection] = Field(default_factory=dict)
    """Trained components with a learning rate, optimizer arguments or an average of their own, by name."""
    low_resolution: Auto[Count] = None
    """Side of the small pictures that a model of super-resolution reads; "auto": that of the model before it."""
    noise_augmentation: Auto[Annotated[float, Field(gt=0, le=1)]] = None
    """The small pictures are noised at a random level below this share of all; "auto": 0.5."""
    frozen_dtype: Maybe[Choice[FrozenDtype]] = None
    """"bfloat16": frozen linear layers and convolutions are stored in bfloat16, with half the memory and the same
    results. "none": frozen weights have the dtype of the trained weights."""


class Variance(StrEnum):
    """Whether a denoiser that states variances learns them."""

    FIXED = "fixed"
    LEARNED_RANGE = "learned_range"


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

    @model_validator(mode="before")
    @classmethod
    def _has_no_dropout(cls, values: object) -> object:
        named = [key for key in ("dropout", "lora_dropout") if isinstance(values, Mapping) and key in values]
        raise_problems(
            f"{key}: dropout is not supported, because its random numbers would depend on the rank; remove it"
            for key in named
        )
        return values

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


class ObjectiveSection(Section):
    """[objective]: the loss."""

    kind: Choice[ObjectiveKind] = ObjectiveKind.AUTO
    """The prediction target of the denoiser; "auto" reads it from the folder's scheduler."""
    snr_gamma: Maybe[Positive] = None
    """Gamma of the min-SNR weighting of the loss over the times; 5 is usual."""
    time_sampling: Choice[TimeSampling] = TimeSampling.UNIFORM
    """The distribution of the training times."""
    shift: Auto[Positive] = None
    """Shift of the times towards noise, for flow matching; 1 means no shift. "auto": the shift of the folder's
    scheduler, which may depend on the resolution."""
    self_conditioning: Fraction = 0.0
    """Share of the samples of every batch for which the denoiser also reads its own estimate of the clean sample, from
    a pass before without gradients (self-conditioning); 0.5 is usual, 0 trains without."""
    variance: Auto[Choice[Variance]] = None
    """"learned_range": a denoiser of pictures also learns the variance of each denoising step; "fixed": it does not.
    "auto": as the folder's scheduler draws."""
    guidance: Auto[NotNegative] = None
    """The guidance value that a distilled model (FLUX.1-dev) reads in training; "auto": 1."""

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> Self:
        problems = []
        if self.kind is ObjectiveKind.FLOW_MATCHING and self.variance is Variance.LEARNED_RANGE:
            problems.append("variance: learned_range has no effect for flow_matching; remove it")
        if self.kind is ObjectiveKind.FLOW_MATCHING and self.snr_gamma is not None:
            problems.append("snr_gamma: it has no effect for flow_matching; remove it")
        if self.kind in (ObjectiveKind.EPSILON, ObjectiveKind.V_PREDICTION):
            if self.shift not in (None, 1):
                problems.append(f"shift: it has no effect for {self.kind}; remove it")
            if self.time_sampling is not TimeSampling.UNIFORM:
                problems.append(f"time_sampling: {self.time_sampling} needs flow_matching, not {self.kind}; remove it")
        raise_problems(problems)
        return self

"""[objective] of a recipe: the quantity that the denoiser learns to predict, the training times and the loss."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from diffusionpipe.models.objectives.objective_settings import (
    DEFAULTS,
    TWO_WEIGHTS_OF_TIMES,
    LossKind,
    Prediction,
    TimeSampling,
    Weighting,
    problems_of,
)
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Fraction,
    Maybe,
    NotNegative,
    Positive,
    Section,
    raise_problems,
)

Range = Annotated[tuple[Fraction, Fraction], Field(strict=False)]


class ObjectiveKind(StrEnum):
    """The quantity that the denoiser predicts."""

    AUTO = "auto"
    EPSILON = "epsilon"
    V_PREDICTION = "v_prediction"
    FLOW_MATCHING = "flow_matching"


class Variance(StrEnum):
    """Whether a denoiser that also predicts variances learns them (DeepFloyd IF)."""

    FIXED = "fixed"
    LEARNED_RANGE = "learned_range"


class ObjectiveSection(Section):
    """[objective]: the loss."""

    kind: Choice[ObjectiveKind] = ObjectiveKind.AUTO
    """The prediction target of the denoiser; `"auto"` reads it from the folder's scheduler."""
    snr_gamma: Maybe[Positive] = None
    """Gamma of the min-SNR weighting of the loss over the times; 5 is usual; not for flow matching."""
    time_sampling: Choice[TimeSampling] = TimeSampling.UNIFORM
    """The distribution of the training times before `shift`; `"speed"` is for `epsilon` and `v_prediction`, the others
    but `"uniform"` for flow matching."""
    logit_mean: float = 0.0
    """Mean of the normal number of `"logit_normal"` times; below 0 more times are near the data."""
    logit_std: Positive = 1.0
    """Standard deviation of the normal number of `"logit_normal"` times."""
    mode_scale: float = 1.29
    """Scale of `"mode"` times, from -1 to 1.75; above 0 times gather in the middle, below 0 at both ends."""
    beta_alpha: Positive = 2.0
    """First parameter of `"beta"` times, from 0.1 to 100; smaller means more times near the data."""
    beta_beta: Positive = 2.0
    """Second parameter of `"beta"` times, from 0.1 to 100; smaller means more times near the noise."""
    speed_pairs: bool = False
    """With `time_sampling = "speed"`: whether two samples of the batch share a draw, the second one at the mirrored
    step."""
    time_range: Range = (0.0, 1.0)
    """Smallest and largest training time after `shift`: 0 is data, 1 is noise."""
    shift: Auto[Positive] = None
    """Shift of the times towards noise, for flow matching; 1 means no shift. `"auto"`: the shift of the folder's
    scheduler, which may depend on the resolution."""
    weighting: Choice[Weighting] = Weighting.NONE
    """The weight of a sample's loss at its time: `"sigma_sqrt"` and `"cosmap"` for flow matching, `"debiased"` for
    `epsilon` and `v_prediction`."""
    loss: Choice[LossKind] = LossKind.L2
    """The cost of an error: `"l2"`, its square, or `"huber"`, a Huber loss, which grows less for large errors."""
    huber_delta: Positive = 0.1
    """The error from which on the Huber loss grows less than the square."""
    offset_noise: NotNegative = 0.0
    """Standard deviation of a normal number that is added to the noise of each channel of a sample; 0.1 is usual, 0 is
    none."""
    self_conditioning: Fraction = 0.0
    """Share of the samples of every batch for which the denoiser also reads its own estimate of the clean sample, from
    a pass before without gradients; 0.5 is usual, 0 trains without."""
    variance: Auto[Choice[Variance]] = None
    """For DeepFloyd IF: `"learned_range"`: the denoiser also learns the variance of each denoising step; `"fixed"`: it
    does not; `"auto"`: as in the folder's scheduler."""
    guidance: Auto[NotNegative] = None
    """The guidance value that a distilled model (FLUX.1-dev) reads in training; `"auto"`: 1. An error for other
    models."""

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> Self:
        problems = []
        if self.kind is ObjectiveKind.FLOW_MATCHING and self.variance is Variance.LEARNED_RANGE:
            problems.append("variance: learned_range has no effect for flow_matching; remove it")
        if self.kind is ObjectiveKind.FLOW_MATCHING and self.snr_gamma is not None:
            problems.append("snr_gamma: it has no effect for flow_matching; remove it")
        if self.weighting is Weighting.DEBIASED and self.snr_gamma is not None:
            problems.append("weighting: debiased and snr_gamma are two weights of one sample; remove one of them")
        if self.time_sampling is TimeSampling.SPEED and self.snr_gamma is not None:
            problems.append(f"snr_gamma: {TWO_WEIGHTS_OF_TIMES.format(key='snr_gamma')}")
        if self.kind in (ObjectiveKind.EPSILON, ObjectiveKind.V_PREDICTION) and self.shift not in (None, 1):
            problems.append(f"shift: it has no effect for {self.kind}; remove it")
        prediction = None if self.kind is ObjectiveKind.AUTO else Prediction(self.kind.value)
        values = {key: getattr(self, key) for key in DEFAULTS}
        problems += [f"{key}: {text}" for key, text in problems_of(values, prediction)]
        raise_problems(problems)
        return self

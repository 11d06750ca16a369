"""[training] of a recipe."""

from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Count,
    Decay,
    Maybe,
    Positive,
    Section,
    Seed,
    Several,
    patterns_for_bool,
)


class OnSpike(StrEnum):
    """The action at a step whose loss or gradient norm is far above its values in the steps before."""

    NONE = "none"
    SKIP = "skip"
    STOP = "stop"


class Clipping(StrEnum):
    """The gradients whose norm clipping looks at: all of the model's, or each block's own."""

    GLOBAL = "global"
    BLOCK = "block"


class RecipePrecision(StrEnum):
    """The arithmetic of the layers.

    Parameters, gradients and the optimizer are float32, for "float64" all is float64.
    """

    AUTO = "auto"
    """Not yet decided: the devices of the job decide it (see `decided`)."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class Average(StrEnum):
    """The place and type in which the moving average of the weights is kept."""

    DEVICE = "device"
    HOST = "host"
    BFLOAT16 = "bfloat16"


class KeptWeights(StrEnum):
    """The type in which trained weights are kept between steps."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Summed(StrEnum):
    """The type in which gradients of weights in bfloat16 are summed."""

    AUTO = "auto"
    """bfloat16 if a gradient comes from one backward of one copy, so that nothing is summed; else float32."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Rounded(StrEnum):
    """The way in which updated weights are rounded to bfloat16."""

    STOCHASTIC = "stochastic"
    KAHAN = "kahan"


class TrainingSection(Section):
    """[training]: how long a run trains, on how large batches, in which arithmetic, and its moving average."""

    seed: Seed = 0
    """Seed of all random numbers of the run."""
    epochs: Maybe[Positive] = None
    """Passes over the training data of the whole run, in place of `steps`; with both the run ends at what comes
    first."""
    steps: Annotated[Maybe[Count], Field(validate_default=True)] = None
    """Optimizer steps of the whole run; required without `epochs`."""
    batch: Annotated[Count, Field(le=1_000_000)]
    """Global batch: samples of one step over all ranks."""
    precision: Choice[RecipePrecision] = RecipePrecision.AUTO
    """Arithmetic: float32, bfloat16 (autocast over float32 weights), or float64 (for tests); `"auto"`: bfloat16 where
    all devices have it, else float32."""
    weights: Choice[KeptWeights] = KeptWeights.FLOAT32
    """How trained weights are kept: `"float32"`, or `"bfloat16"`, for those that layers read in bfloat16 anyway."""
    gradients: Choice[Summed] = Summed.AUTO
    """How gradients of weights in bfloat16 are summed over micro-batches and copies: in `"float32"`, or in
    `"bfloat16"`, whose sums are rounded to the nearest; `"auto"`: in bfloat16 where there is nothing to sum, else in
    float32."""
    rounding: Choice[Rounded] = Rounded.STOCHASTIC
    """How updates of weights in bfloat16 are rounded: `"stochastic"`, or `"kahan"`, which keeps what is lost in a
    second bfloat16 number."""
    deterministic: bool = False
    """Compute only with kernels whose results are the same in every run, which GPUs do not by default."""
    clip_norm: Maybe[Positive] = 1.0
    """Gradient clipping: a larger norm of the gradients is scaled down to this value."""
    clip: Choice[Clipping] = Clipping.GLOBAL
    """The norm that is compared with `clip_norm`: the norm of all gradients together, `"global"`, or of each stage's,
    `"block"`. Without a flush only `"block"` works."""
    post_validation: bool = False
    """Run the optimizer step before the gradient norm over all ranks is known, and undo it if clipping was needed."""
    on_spike: Choice[OnSpike] = OnSpike.NONE
    """The reaction to a step whose loss or gradient norm is far above those before: `"none"`, `"skip"` or `"stop"`."""
    noise_scale_every: Maybe[Count] = 50
    """Steps between two measurements of the gradient noise scale, which says how large a batch is worth its samples;
    they cost one more pass over the gradients. `"none"`: it is not measured."""
    ema_decay: Maybe[Decay] = None
    """Decay of the exponential moving average of the weights (EMA), e.g. 0.9999. Validation, samples and export use the
    average. It warms up: after `n` steps the decay is at most (1 + n) / (10 + n), so a short run forgets its start."""
    ema_states: Choice[Average] = Average.DEVICE
    """How the average is kept between steps: in float32 on the `"device"`, or on the `"host"`, from which each step
    brings it a parameter at a time with the same numbers, or in `"bfloat16"` on the device, rounded stochastically as
    trained weights are."""
    activation_checkpointing: Annotated[Auto[Several[str]], BeforeValidator(patterns_for_bool)] = None
    """Layers that recompute their activations in the backward instead of keeping them, as patterns of names, e.g.
    `["unet.down_blocks.*"]`; true means all. `"auto"`: where the plan is searched, the faster of all and none that
    fits, else none."""

    @field_validator("steps")
    @classmethod
    def _ends(cls, steps: int | None, others: ValidationInfo) -> int | None:
        if steps is None and others.data.get("epochs", 0) is None:  # else epochs are wrong, which is said
            raise ValueError(": this key is required: optimizer steps of the whole run; or set training.epochs")
        return steps

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps of the whole run; `preparation.with_steps` must have set it before."""
        assert self.steps is not None, "the data have not been counted yet"
        return self.steps

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Patterns of the names of layers that recompute their activations; () for none, or if not decided yet."""
        return self.activation_checkpointing or ()

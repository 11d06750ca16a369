"""Checks of the keys of other sections with which `training.weights = "bfloat16"` cannot work."""

from collections.abc import Iterator, Mapping

from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.model_section import LoraSection, ModelSection
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import (
    Average,
    KeptWeights,
    RecipePrecision,
    Rounded,
    Summed,
    TrainingSection,
)

SHARDED = 'copies that hold parts of weights have them in float32; set pipeline.sharded to "optimizer" or false'


def weights_suit_the_training(
    *,
    training: TrainingSection,
    model: ModelSection,
    models: Mapping[str, MemberSection],
    lora: LoraSection,
    pipeline: PipelineSection,
    optimizer: OptimizerSection,
) -> Iterator[str]:
    """A sentence for each setting that excludes weights in bfloat16, or that needs them or a moving average."""
    has_components = bool(model.components) or bool(models)  # which may have averages of their own
    if training.ema_states is not Average.DEVICE and training.ema_decay is None and not has_components:
        yield "training.ema_states: there is no average; set training.ema_decay, e.g. 0.9999, or remove it"
    if training.weights is KeptWeights.FLOAT32:
        if training.rounding is not Rounded.STOCHASTIC:
            yield 'training.rounding: weights in float32 are not rounded; remove it, or set weights = "bfloat16"'
        if training.gradients is Summed.BFLOAT16:
            yield 'training.gradients: weights in float32 have gradients in float32; set weights = "bfloat16" too'
        return
    if training.precision not in (RecipePrecision.AUTO, RecipePrecision.BFLOAT16):
        yield f"training.weights: {too_precise(training.precision)}"
    if lora.rank is not None:
        yield "training.weights: adapters take few bytes and stay float32; remove it (the base has model.frozen_dtype)"
    if training.post_validation:
        yield "training.post_validation: it keeps copies of weights that an update replaces; remove one of the two"
    if pipeline.versions is not Versions.FLUSHED:
        yield 'pipeline.versions: versions of weights are kept in float32; set it to "flushed"'
    if pipeline.parts is Sharded.ALL:
        yield f"training.weights: {SHARDED}"
    classes = [optimizer.name, *([optimizer.rest.name] if optimizer.rest is not None else [])]
    if not any("." in name for name in classes):
        return
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.trial import steps_together

    for name in classes:
        if steps_together(name):
            yield (
                f"training.weights: {name} steps all parameters together, and weights in bfloat16 are stepped a bucket "
                'at a time; set it to "float32", or choose another optimizer'
            )


def too_precise(precision: RecipePrecision) -> str:
    """A sentence: why trained weights are not kept in bfloat16 with this precision, and the remedy."""
    return (
        f'layers would compute in {precision} with weights of bfloat16; set it to "float32", or precision to "bfloat16"'
    )

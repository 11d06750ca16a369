"""Checks of the settings in a recipe that training without a flush excludes or needs."""

from collections.abc import Iterator, Mapping

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.checkpoint_section import CheckpointSection
from diffusionpipe.trainer.recipe.learning_rate_section import LearningRateSection
from diffusionpipe.trainer.recipe.model_section import ModelSection
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.objective_section import ObjectiveSection
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import Clipping, OnSpike, TrainingSection


def versions_suit_the_training(
    *,
    training: TrainingSection,
    learning_rate: LearningRateSection,
    model: ModelSection,
    optimizer: OptimizerSection,
    pipeline: PipelineSection,
    objective: ObjectiveSection,
    checkpoint: CheckpointSection,
    models: Mapping[str, MemberSection],
) -> Iterator[str]:
    """A sentence for each setting that needs a flush in a run without one, or has an effect only without a flush."""
    if pipeline.versions is Versions.FLUSHED:
        if training.clip is Clipping.BLOCK:
            yield "training.clip: clipping each stage is for training without a flush; remove it, or set versions"
        if learning_rate.by_staleness is not None:
            yield "learning_rate.by_staleness: no weights are old where every step ends with a flush; remove it"
        return
    if pipeline.versions is Versions.PREDICTED:
        groups = [optimizer.arguments | own.optimizer_arguments for own in model.components.values()]
        classes = [(optimizer.name, arguments) for arguments in (optimizer.arguments, *groups)]
        classes += [(optimizer.rest.name, optimizer.rest.arguments)] if optimizer.rest is not None else []
        if not all(_has_direction(name, arguments) for name, arguments in classes):
            why = refusal(Feature.PREDICTION, Feature.OTHER_OPTIMIZER, name=optimizer.name)
            yield f"pipeline.versions: {why}"
    if models:
        yield f"pipeline.versions: {refusal(Feature.VERSIONS, Feature.SEVERAL_MODELS)}"
    if training.clip_norm is not None and training.clip is Clipping.GLOBAL:
        yield f"training.clip: {refusal(Feature.VERSIONS, Feature.GLOBAL_CLIPPING)}"
    if training.clip_norm is None and training.clip is Clipping.BLOCK:
        yield "training.clip: nothing is clipped without a clip_norm; set clip_norm, or leave out clip"
    if training.post_validation:
        yield f"training.post_validation: {refusal(Feature.VERSIONS, Feature.POST_VALIDATION)}"
    if training.on_spike is not OnSpike.NONE:
        yield f"training.on_spike: {refusal(Feature.VERSIONS, Feature.SPIKES)}"
    if objective.self_conditioning > 0:
        yield f"objective.self_conditioning: {refusal(Feature.VERSIONS, Feature.SELF_CONDITIONING)}"
    if checkpoint.asynchronous:
        yield (
            "checkpoint.asynchronous: without a flush weights change while a checkpoint would be copied; leave it out, "
            'or set versions = "flushed"'
        )


def _has_direction(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether the optimizer's state shows where its next steps go, as `trainer.optim.lookahead` reads it."""
    return name in ("Adam", "AdamW") or (name == "SGD" and bool(arguments.get("momentum")))

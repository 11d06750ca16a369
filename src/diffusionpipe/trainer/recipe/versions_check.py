"""What training without a flush asks of the other sections."""

from collections.abc import Iterator, Mapping

from diffusionpipe.ir.combinations import Feature, refusal
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.model_section import ObjectiveSection
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import Clip, OnSpike, TrainingSection


def versions_suit_the_training(
    *,
    training: TrainingSection,
    pipeline: PipelineSection,
    objective: ObjectiveSection,
    models: Mapping[str, MemberSection],
) -> Iterator[str]:
    """Settings of [training] and [objective] that need a flush, and one that needs its absence."""
    if pipeline.versions is Versions.FLUSHED:
        if training.clip is Clip.BLOCK:
            yield "training.clip: clipping each stage is for training without a flush; remove it, or set versions"
        return
    if models:
        yield f"pipeline.versions: {refusal(Feature.VERSIONS, Feature.SEVERAL_MODELS)}"
    if training.clip_norm is not None and training.clip is Clip.GLOBAL:
        yield f"training.clip: {refusal(Feature.VERSIONS, Feature.GLOBAL_CLIPPING)}"
    if training.post_validation:
        yield f"training.post_validation: {refusal(Feature.VERSIONS, Feature.POST_VALIDATION)}"
    if training.on_spike is not OnSpike.NONE:
        yield f"training.on_spike: {refusal(Feature.VERSIONS, Feature.SPIKES)}"
    if objective.self_conditioning > 0:
        yield f"objective.self_conditioning: {refusal(Feature.VERSIONS, Feature.SELF_CONDITIONING)}"

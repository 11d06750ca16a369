"""What training without a flush asks of the other sections."""

from collections.abc import Iterator

from diffusionpipe.ir.combinations import Feature, refusal
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.model_section import ObjectiveSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import Clip, OnSpike, TrainingSection


def versions_suit_the_training(
    *, training: TrainingSection, pipeline: PipelineSection, objective: ObjectiveSection
) -> Iterator[str]:
    """Settings of [training] and [objective] that need a flush, and one that needs its absence."""
    if pipeline.versions is Versions.FLUSHED:
        if training.clip is Clip.BLOCK:
            yield "training.clip: clipping each stage is for training without a flush; remove it, or set versions"
        return
    asked = (
        ("training.clip", Feature.GLOBAL_CLIPPING, training.clip_norm is not None and training.clip is Clip.GLOBAL),
        ("training.post_validation", Feature.POST_VALIDATION, training.post_validation),
        ("training.on_spike", Feature.SPIKES, training.on_spike is not OnSpike.NONE),
        ("objective.self_conditioning", Feature.SELF_CONDITIONING, objective.self_conditioning > 0),
    )
    yield from (f"{key}: {refusal(Feature.VERSIONS, one)}" for key, one, is_asked in asked if is_asked)

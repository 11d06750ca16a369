"""Checks of the keys of other sections with which `optimizer.in_backward` cannot work."""

from collections.abc import Iterator, Mapping

from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import OnSpike, TrainingSection

ONE_MICROBATCH = (
    "the gradients of several micro-batches are summed, and all sums are there before the last one, so nothing would "
    "be saved; set pipeline.microbatches = 1"
)
ONE_COPY = "copies sum their gradients when the backward is over; set pipeline.data_parallel = 1 and no replicas"
WHOLE_BACKWARDS = "the schedule computes gradients of weights later than the backward; use another, such as 1f1b"


def updates_in_backward_suit(
    *,
    training: TrainingSection,
    optimizer: OptimizerSection,
    pipeline: PipelineSection,
    models: Mapping[str, MemberSection],
) -> Iterator[str]:
    """A sentence for each setting with which `optimizer.in_backward` cannot work.

    Most of these settings need all gradients of a step at the same time.
    """
    if not optimizer.in_backward:
        return
    asked = (
        (
            training.clip_norm is not None,
            'gradients are gone when their norm is there; set training.clip_norm = "none"',
        ),
        (training.on_spike is not OnSpike.NONE, 'a spike is seen when all is updated; set training.on_spike = "none"'),
        (training.post_validation, "an update cannot be undone; remove training.post_validation"),
        (pipeline.versions is not Versions.FLUSHED, 'a step has no end of its own; set pipeline.versions = "flushed"'),
        (bool(models), "several models share a step; remove it"),
        (pipeline.plan is None and pipeline.sizes.microbatches > 1, ONE_MICROBATCH),
        (pipeline.is_searched and pipeline.microbatches != 1, ONE_MICROBATCH),
        (pipeline.is_searched and pipeline.data_parallel != 1, ONE_COPY),
        (pipeline.sizes.data_parallel > 1 or max(pipeline.replicas, default=1) > 1, ONE_COPY),
    )
    # Two conditions may have one reason.
    yield from dict.fromkeys(f"optimizer.in_backward: {why}" for is_asked, why in asked if is_asked)
    classes = [optimizer.name, *([optimizer.rest.name] if optimizer.rest is not None else [])]
    if not any("." in name for name in classes):
        return
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.trial import steps_together

    for name in classes:
        if steps_together(name):
            yield f"optimizer.in_backward: {name} steps all parameters together; choose another optimizer"

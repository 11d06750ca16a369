"""Checks of the settings with which optimizers cannot work that have modes, values of groups or sums over all."""

from collections.abc import Iterator, Sequence

from diffusionpipe.holding.rest import RESTS
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.group_section import RateSchedule
from diffusionpipe.trainer.recipe.learning_rate_section import LearningRateSection
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.training_section import TrainingSection

_STEADY = (RateSchedule.CONSTANT, RateSchedule.CONSTANT_WITH_WARMUP)


def optimizer_suits_the_training(
    *,
    optimizer: OptimizerSection,
    learning_rate: LearningRateSection,
    training: TrainingSection,
    pipeline: PipelineSection,
) -> Iterator[str]:
    """A sentence for each setting of a recipe with which its optimizer cannot work.

    The reasons are the optimizer's modes, the place of its states, and its sums over all parameters.
    """
    classes = [optimizer.name, *([optimizer.rest.name] if optimizer.rest is not None else [])]
    yield from _problems_of_states(optimizer, classes, training, pipeline)
    if not any("." in name for name in classes):
        return
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.classes import has_modes, optimizer_class
    from diffusionpipe.trainer.optim.prodigy import PATHS
    from diffusionpipe.trainer.optim.trial import has_group_values

    name = optimizer.name
    is_averaging, is_prodigy = has_modes(optimizer_class(name)), name in PATHS
    if is_averaging and learning_rate.schedule not in _STEADY:
        yield (f"learning_rate.schedule: {name} replaces a decaying rate by an average of its own; set it to constant")
    if is_averaging and training.ema_decay is not None:
        yield f"training.ema_decay: {name} has an average of its own, which is read everywhere; remove it"
    if optimizer.rest is not None:
        for one in classes:
            if one in PATHS or has_modes(optimizer_class(one)):
                yield f"optimizer.rest: {one} counts on all parameters being its own; remove rest"
    if is_prodigy and len({own.get("learning_rate", None) for own in optimizer.groups.values()} - {None}) > 0:
        yield f"optimizer.groups: {name} has one rate for all parameters; remove learning_rate there"
    if is_prodigy and training.post_validation:
        yield f"training.post_validation: {name} sums over all parameters before it steps; remove it"
    if pipeline.versions is not Versions.FLUSHED and any(has_group_values(one) for one in classes if "." in one):
        yield (
            f"pipeline.versions: {name} counts steps of all its parameters together, and without a flush each stage "
            'steps by itself; set it to "flushed", or choose another optimizer'
        )


def _problems_of_states(
    optimizer: OptimizerSection, classes: Sequence[str], training: TrainingSection, pipeline: PipelineSection
) -> Iterator[str]:
    """A sentence for each setting that excludes states on the host (`optimizer.states`).

    Such settings need all states on the device, or step all parameters at one time. `classes`: the optimizer classes.
    """
    if RESTS[optimizer.states].is_plain:
        return
    if training.post_validation:
        yield "optimizer.states: a post-validated step keeps a copy of all states on the device; remove one of the two"
    if pipeline.versions is Versions.PREDICTED:
        yield 'optimizer.states: predicted weights read the states in every forward; set it to "device"'
    from diffusionpipe.trainer.optim.trial import has_group_values

    for name in classes:
        if "." in name and has_group_values(name):
            yield (
                f"optimizer.states: {name} counts steps of all its parameters together, and states that are kept "
                'elsewhere are stepped a bucket at a time; set it to "device", or choose another optimizer'
            )

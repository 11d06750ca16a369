"""Keys with which one model, or one component of it, is trained otherwise than the rest.

[optimizer]                            [model]
learning_rate = 1e-4                   train = ["unet", "text_encoder"]
arguments = { weight_decay = 0.01 }
                                       [model.components.text_encoder]
                                       learning_rate = 1e-6
                                       optimizer_arguments = { weight_decay = 0.0 }
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.section import FOR_ALL, Arguments, Auto, Choice, Decay, Fraction, Positive, Section


class RateSchedule(StrEnum):
    """The form of the learning rate over the steps, by its name in a recipe."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    REDUCE_LR_ON_PLATEAU = "reduce_lr_on_plateau"
    GREEDY = "greedy"

    @property
    def is_own(self) -> bool:
        """Whether a formula of ours computes this schedule, not transformers' `get_scheduler`."""
        return self in (RateSchedule.CONSTANT, RateSchedule.LINEAR, RateSchedule.COSINE)

    @property
    def reads_losses(self) -> bool:
        """Whether the rate depends on the losses so far."""
        return self in (RateSchedule.REDUCE_LR_ON_PLATEAU, RateSchedule.GREEDY)


ELSEWHERE = {
    "learning_rate": ("optimizer", "learning_rate"),
    "optimizer_arguments": ("optimizer", "arguments"),
    "learning_rate_schedule": ("learning_rate", "schedule"),
    "warmup_steps": ("learning_rate", "warmup_steps"),
    "learning_rate_final": ("learning_rate", "final"),
    "ema_decay": ("training", "ema_decay"),
    "resolution": ("data", "resolution"),
    "clip_norm": ("training", "clip_norm"),
    "microbatches": ("pipeline", "microbatches"),
}
"""Key of [models.NAME] -> the section and key that say the same for all models. Components have the first six keys."""

SWITCHED_OFF = ("ema_decay", "clip_norm")
"""The keys in `ELSEWHERE` whose key for all models can be "none", which switches them off for all models."""

_OTHERS = tuple(schedule for schedule in RateSchedule if not schedule.is_own)


class GroupSection(Section):
    """The keys that one group of parameters may have for itself; "auto" is then the value for all groups."""

    learning_rate: Auto[Positive] = None
    """Its highest learning rate; `"auto"`: `optimizer.learning_rate`."""
    learning_rate_schedule: Auto[Choice[RateSchedule]] = None
    """Its decay after the warm-up; `"auto"`: `learning_rate.schedule`."""
    warmup_steps: Auto[Annotated[int, Field(ge=0, le=2**53)]] = None
    """Steps of its warm-up; `"auto"`: `learning_rate.warmup_steps`."""
    learning_rate_final: Auto[Fraction] = None
    """Its rate at the last step as a fraction of the highest; `"auto"`: `learning_rate.final`."""
    optimizer_arguments: Arguments = Field(default_factory=dict)
    """Values that replace those in `optimizer.arguments`, e.g. `{ weight_decay = 0.0 }`; the others stay. The class,
    `optimizer.name`, is the same for the whole run."""
    ema_decay: Auto[Decay] = None
    """Decay of its moving average; `"auto"`: `training.ema_decay`."""


def own_values(own: GroupSection, sections: Mapping[str, Any]) -> dict[str, Section]:
    """The sections, by name, that a group's own values change, with these values in place of the values for all.

    `sections`: all sections, by name, with the values for all.
    """
    changed: dict[str, Section] = {}
    for key, (name, general) in ELSEWHERE.items():
        value = getattr(own, key, None)
        if value is None or value == {} or name not in sections:
            continue
        section = changed.get(name, sections[name])
        if isinstance(value, dict):
            value = {**getattr(section, general), **value}
        changed[name] = section.model_copy(update={general: value})
    return changed


def problems_of_group(key: str, own: GroupSection, sections: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each fault of a group's own values, each with the values for all in `sections`.

    It begins with `key`, the dotted key of the group's section.
    """
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.optimizer import build_optimizer

    merged = {**sections, **own_values(own, sections)}
    optimizer, rates, training = merged["optimizer"], merged["learning_rate"], merged["training"]
    general = [argument for argument in FOR_ALL if argument in own.optimizer_arguments]
    for argument in general:
        yield f"{key}.optimizer_arguments.{argument}: it holds for all parameters; set it in [optimizer.arguments]"
    if own.optimizer_arguments and not general:
        try:
            # Without parameters: only the arguments are checked.
            build_optimizer(optimizer.name, {}, optimizer.learning_rate, optimizer.arguments)
        except RecipeError as error:
            yield f"{key}.optimizer_arguments: {error}"
    warmup, steps = own.warmup_steps, training.steps
    if warmup is not None and steps is not None and warmup >= steps:
        yield (f"{key}.warmup_steps: {warmup} is not less than the {steps} steps of the run; use a shorter warm-up")
    if own.learning_rate_final not in (None, 0, 1) and rates.schedule in (RateSchedule.CONSTANT, *_OTHERS):
        yield (
            f"{key}.learning_rate_final: it has no effect on a {rates.schedule} schedule; set learning_rate_schedule "
            "to linear or cosine, or remove it"
        )
    if own.learning_rate_schedule is not None and own.learning_rate_schedule.reads_losses:
        yield f"{key}.learning_rate_schedule: one schedule reads the losses of all; set learning_rate.schedule"

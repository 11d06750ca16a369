"""[learning_rate]: the rate over the steps of a run."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from diffusionpipe.trainer.recipe.group_section import RateSchedule
from diffusionpipe.trainer.recipe.section import Arguments, Choice, Count, Fraction, Maybe, Section


class LearningRateSection(Section):
    """[learning_rate]: how the learning rate warms up and decays."""

    schedule: Choice[RateSchedule] = RateSchedule.CONSTANT
    """The decay after the warm-up: constant, linear or cosine, or one of transformers' `get_scheduler`."""
    warmup_steps: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Steps over which the rate rises linearly to `optimizer.learning_rate`."""
    final: Fraction = 0.0
    """The end of the decay as a fraction of the highest rate, reached one step after the last; for linear and
    cosine."""

    arguments: Arguments = Field(default_factory=dict)
    """Arguments of a schedule of transformers, e.g. `{ num_cycles = 3 }`."""

    by_staleness: Maybe[Count] = None
    """Without a flush after each step: the steps over which stages with old weights go from a lower rate to the usual
    one; `"none"`: all stages have the usual rate."""

    @model_validator(mode="after")
    def _final_has_an_effect(self) -> Self:
        has_final = self.schedule in (RateSchedule.LINEAR, RateSchedule.COSINE)
        if not has_final and self.final not in (0, 1):
            raise ValueError(
                f"final: it has no effect on a {self.schedule} schedule; choose linear or cosine, or remove final"
            )
        if self.schedule.is_own and self.arguments:
            raise ValueError(
                f"arguments: the {self.schedule} schedule takes none; choose one of transformers, or remove arguments"
            )
        return self

"""[optimizer]: the class that changes the parameters, and its arguments."""

from typing import Self

from pydantic import Field, model_validator

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.section import Arguments, Positive, Section


class OptimizerSection(Section):
    """[optimizer]: any class of torch.optim."""

    name: str = "AdamW"
    """Name of the class."""
    learning_rate: Positive = 1e-4
    """The highest learning rate, after the warm-up."""
    arguments: Arguments = Field(default_factory=dict)
    """Further keyword arguments, e.g. weight_decay = 0.01, betas = [0.9, 0.99]."""

    @model_validator(mode="after")
    def _is_known_to_torch(self) -> Self:
        # Imported only here: torch takes seconds, and a recipe's schema must not need it.
        from diffusionpipe.trainer.optim.optimizer import build_optimizer

        try:
            build_optimizer(self.name, {}, self.learning_rate, self.arguments)
        except RecipeError as error:
            raise ValueError(f": {error}") from error
        return self

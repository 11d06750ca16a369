"""[optimizer]: the class that changes the parameters, and its arguments; other classes and values for some of them.

[optimizer]                                 [optimizer.groups]
name = "Muon"                               "*.bias" = { weight_decay = 0.0 }
learning_rate = 1e-3                        "*norm*" = { weight_decay = 0.0, learning_rate = 1e-4 }

[optimizer.rest]
name = "AdamW"
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from diffusionpipe.errors import RecipeError
from diffusionpipe.holding.rest import RESTS
from diffusionpipe.trainer.recipe.section import (
    FOR_ALL,
    Arguments,
    Auto,
    Maybe,
    Positive,
    Section,
    Several,
    raise_problems,
)

EMBEDDINGS = ("*embed*",)
"""Patterns of the parameters that look values up, by how diffusers and transformers name them."""


class RestSection(Section):
    """[optimizer.rest]: the class for vectors and embeddings, and for the first and the last layer."""

    name: str = "AdamW"
    """The class, as in `optimizer.name`."""
    learning_rate: Auto[Positive] = None
    """Its highest learning rate, also for components that have their own; `"auto"`: `optimizer.learning_rate`, or the
    component's."""
    arguments: Arguments = Field(default_factory=dict)
    """Keyword arguments of the class."""
    parameters: Several[str] = EMBEDDINGS
    """Patterns of further parameters that it steps, by name."""


class OptimizerSection(Section):
    """[optimizer]: any class of torch.optim by its name, any other by its path."""

    name: str = "AdamW"
    """Name of a class of `torch.optim` (not LBFGS or SparseAdam), or the path of any other, e.g.
    `"bitsandbytes.optim.AdamW8bit"`."""
    learning_rate: Positive = 1e-4
    """The highest learning rate, after the warm-up."""
    arguments: Arguments = Field(default_factory=dict)
    """Further keyword arguments of the class, e.g. `{ weight_decay = 0.01, betas = [0.9, 0.99] }`."""
    rest: Maybe[RestSection] = None
    """The section [optimizer.rest]: the class for vectors, embeddings, the first and the last layer, where `name` is
    for matrices, as Muon is; `"none"`: the same."""
    states: str = "device"
    """Where the optimizer's states (for AdamW, two numbers for each parameter) are kept between updates: `"device"`, or
    `"host"`, from which each update brings them to the device a bucket of parameters at a time, with the same numbers.
    `"host"` is refused with classes that count steps of all parameters together, with `training.post_validation` and
    with `versions = "predicted"`."""
    in_backward: bool = False
    """Whether each parameter is stepped within the backward, as soon as its gradient is there, which is freed then."""
    groups: dict[str, Arguments] = Field(default_factory=dict)
    """Patterns of parameters with arguments or a learning rate of their own; the first that fits holds."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.rest is None:
            problem = _problem_of(self.name, self.learning_rate, self.arguments)
        else:
            rest = self.rest
            if rest.name == "Muon":
                raise ValueError("rest.name: Muon steps matrices alone, and rest has the vectors; use e.g. AdamW there")
            problem = _problem_of(self.name, self.learning_rate, self.arguments)
            problem = problem or _problem_of(rest.name, rest.learning_rate or self.learning_rate, rest.arguments)
        if problem is not None:
            raise ValueError(f": {problem}")
        if self.states not in RESTS:
            raise ValueError(f"states: {self.states!r} is not known; use {' or '.join(RESTS)}")
        raise_problems(self._problems_of_groups())
        return self

    def _problems_of_groups(self) -> Iterator[str]:
        for pattern, values in self.groups.items():
            key, own = f'groups."{pattern}"', dict(values)
            rate = own.pop("learning_rate", self.learning_rate)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
                yield f"{key}.learning_rate: expected a number above 0; change it"
            if "|" in pattern or pattern in ("", "rest"):
                yield f'{key}: expected a pattern of names such as "*.bias"; change it'
            if not values:
                yield f"{key}: it says nothing; give it e.g. weight_decay = 0.0, or remove it"
            general = [argument for argument in FOR_ALL if argument in own]
            for argument in general:
                yield f"{key}.{argument}: it holds for all parameters; set it in [optimizer.arguments]"
            if not general and (problem := _problem_of(self.name, self.learning_rate, {**self.arguments, **own})):
                yield f"{key}: {problem}"

    @property
    def of_rest(self) -> "OptimizerSection":
        """A copy of the section with the class, arguments and rate of [optimizer.rest], which must not be "none"."""
        assert self.rest is not None
        update: dict[str, Any] = {
            "name": self.rest.name,
            "arguments": self.rest.arguments,
            "learning_rate": self.rest.learning_rate or self.learning_rate,
        }
        return self.model_copy(update=update)

    def of_group(self, pattern: str) -> "OptimizerSection":
        """A copy of the section with the arguments and the learning rate that `optimizer.groups` has for a pattern."""
        own = dict(self.groups[pattern])
        rate = own.pop("learning_rate", self.learning_rate)
        return self.model_copy(update={"learning_rate": rate, "arguments": {**self.arguments, **own}})


def _problem_of(name: str, learning_rate: float, arguments: Mapping[str, object]) -> str | None:
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.classes import quiet
    from diffusionpipe.trainer.optim.optimizer import build_optimizer

    try:
        with quiet():
            build_optimizer(name, {}, learning_rate, arguments)
    except RecipeError as error:
        return str(error)
    return None

"""Which trained parameter belongs to which group: a model, or a component of it with values of its own.

unet.conv_in.weight                 group ""                       [model], [optimizer], [learning_rate]
text_encoder.final_norm.weight      group "text_encoder"           [model.components.text_encoder] over these
base/unet.conv_in.weight            group "base"                   [models.base] over these
base/text_encoder.final_norm.bias   group "base/text_encoder"      [models.base.components.text_encoder] over both
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.learning_rate import Decay, LearningRateSchedule
from diffusionpipe.trainer.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """The groups of a run."""

    recipes: Mapping[str, Recipe]
    """The recipe as it holds for each group."""
    group_of: Mapping[str, str]
    """Trained parameter -> its group."""

    def rates(self, backbone: str) -> dict[str, LearningRateSchedule]:
        """The learning rates of a model's groups."""
        return {
            name: learning_rates(recipe)
            for name, recipe in self.recipes.items()
            if name == backbone or not backbone or name.startswith(f"{backbone}/")
        }

    def arguments(self, group: str) -> dict[str, object]:
        """The arguments of the group's optimizer."""
        return dict(self.recipes[group].optimizer.arguments)

    def average(self, parameters: Mapping[str, nn.Parameter]) -> Ema | None:
        """The moving average of a rank's parameters; None on all ranks where the recipe wants none."""
        if not has_average(self.recipes):
            return None
        decays = {name: self.recipes[self.group_of[name]].training.ema_decay for name in parameters}
        return Ema(parameters, {name: decay for name, decay in decays.items() if decay is not None})


def parameter_groups(recipe: Recipe, model: ModelGraph) -> ParameterGroups:
    """The groups of a recipe's models.

    Raises:
        RecipeError: a component with values of its own is not trained.
    """
    recipes, group_of = recipe.groups(), {}
    for backbone in model.backbones:
        for name in model.parameters_of(model.layers_of(backbone)):
            component = name.partition(".")[0]
            group_of[name] = component if component in recipes else backbone.name
    components = {name.partition(".")[0] for name in group_of}
    problems = []
    for name in set(recipes) - set(recipe.backbones) - components:
        member, _, own = name.rpartition("/")
        where, trained = (f"models.{member}" if member else "model"), ", ".join(sorted(components))
        problems.append(
            f"{where}.components.{own}: {own} is not trained (trained: {trained}); add it to {where}.train, or remove "
            "this section"
        )
    if problems:
        raise RecipeError("\n".join(sorted(problems)))
    return ParameterGroups(recipes, group_of)


def has_average(recipes: Mapping[str, Recipe]) -> bool:
    """Whether any of a run's groups has a moving average."""
    return any(recipe.training.ema_decay is not None for recipe in recipes.values())


def learning_rates(recipe: Recipe) -> LearningRateSchedule:
    """The learning rate's course as the recipe states it."""
    return LearningRateSchedule(
        peak=recipe.optimizer.learning_rate,
        decay=Decay(recipe.learning_rate.schedule.value),
        warmup_steps=recipe.learning_rate.warmup_steps,
        total_steps=recipe.training.num_steps,
        final_fraction=recipe.learning_rate.final,
    )

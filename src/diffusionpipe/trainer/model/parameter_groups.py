"""Which trained parameter belongs to which group: a model, or a component of it with values of its own.

unet.conv_in.weight                 group ""                       [model], [optimizer], [learning_rate]
text_encoder.final_norm.weight      group "text_encoder"           [model.components.text_encoder] over these
base/unet.conv_in.weight            group "base"                   [models.base] over these
base/text_encoder.final_norm.bias   group "base/text_encoder"      [models.base.components.text_encoder] over both

A part of a group whose optimizer differs is a group of its own: "|rest" of [optimizer.rest], "text_encoder|*.bias" of a
pattern in [optimizer.groups].
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from diffusionpipe.costs import Backbone, ModelGraph
from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.classes import has_modes, optimizer_class
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.learning_rate import Decay, LearningRateSchedule
from diffusionpipe.trainer.optim.optimizer import Group, RankOptimizer
from diffusionpipe.trainer.optim.read_weights import ReadWeights
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.optimizer_section import EMBEDDINGS, OptimizerSection


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """The group of each trained parameter of a run, and the recipe with the values that hold for each group."""

    recipes: Mapping[str, Recipe]
    """Name of a group -> the recipe with the values that hold for it."""
    group_of: Mapping[str, str]
    """Canonical name of a trained parameter -> name of its group."""

    def rates(self, backbone: str) -> dict[str, LearningRateSchedule]:
        """The learning rate schedule of each group of the model `backbone`, by the group's name.

        For "" the schedules of all groups.
        """
        return {
            name: learning_rates(recipe)
            for name, recipe in self.recipes.items()
            if name == backbone or not backbone or name.startswith((f"{backbone}/", f"{backbone}|"))
        }

    def group(self, parameter: str) -> Group:
        """The optimizer's group of the parameter with this canonical name: the group's name, class and arguments."""
        name = self.group_of[parameter]
        settings = self.recipes[name].optimizer
        return Group(name, dict(settings.arguments), optimizer=settings.name, is_flat=self._is_flat(name))

    def stepped_shapes(self, group: str, model: ModelGraph) -> dict[str, tuple[int, ...]]:
        """The shapes in which the optimizer steps the parameters of a group, by canonical name: some as matrices."""
        is_flat = self._is_flat(group)
        return {
            p.name: (p.shape[0], prod(p.shape[1:])) if is_flat and len(p.shape) > 2 else p.shape
            for p in model.parameters
            if self.group_of.get(p.name) == group
        }

    def _is_flat(self, group: str) -> bool:
        """Whether the optimizer steps the parameters of a group that have more than two dimensions as matrices."""
        return self.recipes[group].optimizer.rest is not None and not is_of_rest(group)

    def average(
        self, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer | None
    ) -> Ema | ReadWeights | None:
        """A new average of a rank's parameters: a schedule-free optimizer's own, or the moving average of the recipe.

        None on all ranks if the run has no average.
        """
        if any(has_modes(optimizer_class(recipe.optimizer.name)) for recipe in self.recipes.values()):
            return ReadWeights(parameters, optimizer)
        if not has_average(self.recipes):
            return None
        decays = {name: self.recipes[self.group_of[name]].training.ema_decay for name in parameters}
        training = next(iter(self.recipes.values())).training
        own = {name: decay for name, decay in decays.items() if decay is not None}
        return Ema(parameters, own, training.ema_states, training.seed)


def parameter_groups(recipe: Recipe, model: ModelGraph) -> ParameterGroups:
    """The groups of the trained parameters of a recipe's models.

    Raises:
        RecipeError: a component with values of its own is not trained, a pattern of [optimizer.groups] or
            [optimizer.rest] fits no parameter, or all belong to [optimizer.rest]; every problem is listed.
    """
    general, group_of = recipe.groups(), {}
    shapes = {parameter.name: parameter.shape for parameter in model.parameters}
    recipes: dict[str, Recipe] = {}
    for backbone in model.backbones:
        outer = _outer_layers(model, backbone)
        for name in model.parameters_of(model.layers_of(backbone)):
            component = name.partition(".")[0]
            group = component if component in general else backbone.name
            parts = general[group].subgroups()
            part = _part_of(name, general[group].optimizer, len(shapes[name]), is_outer=name in outer)
            group_of[name] = f"{group}|{part}" if part else group
            recipes[group_of[name]] = parts[part]
    components = {name.partition(".")[0] for name in group_of}
    problems = []
    # A section of a component that no model trains has no parameters.
    for name in set(general) - set(recipe.backbones) - components:
        member, _, own = name.rpartition("/")
        where, trained = (f"models.{member}" if member else "model"), ", ".join(sorted(components))
        problems.append(
            f"{where}.components.{own}: {own} is not trained (trained: {trained}); add it to {where}.train, or remove "
            "this section"
        )
    # A group's name is "model|rest|pattern", each part only where there is one.
    used = {part for group in recipes for part in group.split("|")[1:]}
    problems += [
        f'optimizer.groups."{pattern}": {_unused(pattern, list(group_of))}'
        for pattern in recipe.optimizer.groups
        if pattern not in used
    ]
    problems += _unused_of_rest(recipe.optimizer, list(group_of))
    if recipe.optimizer.rest is not None and group_of.keys() == {
        name for name in group_of if is_of_rest(group_of[name])
    }:
        problems.append(
            f"optimizer.rest: all trained parameters belong to it, and none to {recipe.optimizer.name}; remove it"
        )
    if problems:
        raise RecipeError("\n".join(sorted(problems)))
    return ParameterGroups({**general, **recipes}, group_of)


def is_of_rest(group: str) -> bool:
    """Whether [optimizer.rest] steps the group of this name."""
    return "rest" in group.split("|")[1:2]


def _unused(pattern: str, names: Sequence[str]) -> str:
    """The reason why none of the parameters `names` is in the group of a pattern, and the remedy."""
    if any(fnmatchcase(name.rpartition("/")[2], pattern) for name in names):
        return "all parameters of such names are in groups before it; put it first, or remove it"
    example = f"; one of the names is {names[0]}" if names else ""
    return f"no trained parameter has such a name; change the pattern, or remove it{example}"


def _unused_of_rest(optimizer: OptimizerSection, names: Sequence[str]) -> Iterator[str]:
    """A problem for each pattern that the recipe states in `optimizer.rest.parameters` and no parameter's name fits."""
    if optimizer.rest is None or optimizer.rest.parameters == EMBEDDINGS:
        return
    for pattern in optimizer.rest.parameters:
        if not any(fnmatchcase(name.rpartition("/")[2], pattern) for name in names):
            yield f'optimizer.rest.parameters: "{pattern}": {_unused(pattern, names)}'


def _part_of(parameter: str, optimizer: OptimizerSection, dimensions: int, *, is_outer: bool) -> str:
    """The part of its group to which a parameter belongs, named as in `Recipe.subgroups`: "", "rest", "*.bias", ...

    `dimensions`: of the parameter; `is_outer`: whether it belongs to the first or the last layer of its backbone.
    """
    own = parameter.rpartition("/")[2]
    parts = []
    if optimizer.rest is not None:
        is_named = any(fnmatchcase(own, pattern) for pattern in optimizer.rest.parameters)
        # Fewer than two dimensions: biases and norms.
        parts += ["rest"] if dimensions < 2 or is_outer or is_named else []
    parts += [pattern for pattern in optimizer.groups if fnmatchcase(own, pattern)][:1]  # of several patterns the first
    return "|".join(parts)


def _outer_layers(model: ModelGraph, backbone: Backbone) -> frozenset[str]:
    """The names of the parameters of a backbone's first and last layer, layers without parameters left out."""
    layers = [layer for layer in model.layers if layer.name in set(model.layers_of(backbone)) and layer.parameters]
    return frozenset(name for layer in (layers[0], layers[-1]) for name in layer.parameters) if layers else frozenset()


def is_averaged(recipes: Mapping[str, Recipe]) -> bool:
    """Whether validation, samples and exports of a run read an average: a moving one, or the optimizer's own.

    `recipes`: the recipe as it holds for each group of parameters.
    """
    own = {recipe.optimizer.name for recipe in recipes.values()}
    return has_average(recipes) or any(has_modes(optimizer_class(name)) for name in own)


def has_average(recipes: Mapping[str, Recipe]) -> bool:
    """Whether any group of parameters has a moving average; `recipes`: the recipe as it holds for each group."""
    return any(recipe.training.ema_decay is not None for recipe in recipes.values())


def learning_rates(recipe: Recipe) -> LearningRateSchedule:
    """The learning rate as a function of the step, as the recipe states it."""
    schedule = recipe.learning_rate.schedule
    return LearningRateSchedule(
        peak=recipe.optimizer.learning_rate,
        decay=Decay(schedule.value) if schedule.is_own else Decay.CONSTANT,
        named="" if schedule.is_own else schedule.value,
        arguments=json.dumps(recipe.learning_rate.arguments, sort_keys=True),
        warmup_steps=recipe.learning_rate.warmup_steps,
        total_steps=recipe.training.num_steps,
        final_fraction=recipe.learning_rate.final,
    )

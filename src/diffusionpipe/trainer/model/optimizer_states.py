"""The bytes that a recipe's optimizer keeps beside each trained parameter."""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding import Item, State
from diffusionpipe.holding.rest import RESTS, Rest
from diffusionpipe.holding.state import Sized
from diffusionpipe.holding.workload import has_plain_states
from diffusionpipe.trainer.model.parameter_groups import parameter_groups
from diffusionpipe.trainer.optim.optimizer import state_per_parameter
from diffusionpipe.trainer.optim.trial import KeptStates, Shape, kept_bytes
from diffusionpipe.trainer.recipe import Recipe, RecipePrecision
from diffusionpipe.units import Bytes

_EXAMPLE: Shape = (128, 128)
"""The shape of a parameter whose states are counted in place of all others where the model is not given."""


def optimizer_states(recipe: Recipe, model: ModelGraph | None) -> tuple[State | None, Bytes]:
    """(bytes of the states that a recipe's optimizer keeps for each parameter, bytes that each rank holds once).

    The first is None if the optimizer keeps no states. Classes of torch.optim keep whole tensors of each parameter's
    shape: their bytes for each number are enough. For other classes, for Adafactor, and where two classes share the
    parameters, the states of each shape are counted. Without `model` an example stands for all shapes.

    Raises:
        RecipeError: the states cannot be counted.
    """
    subgroups = [one for group in recipe.groups().values() for one in group.subgroups().values()]
    width = 8 if recipe.training.precision is RecipePrecision.FLOAT64 else 4
    if all(_is_plain(one) for one in subgroups):
        # The most counts for all groups.
        most = max(state_per_parameter(one.optimizer.name, one.optimizer.arguments) for one in subgroups)
        return (State(item=Item.OPTIMIZER, width=width * most) if most else None), 0
    dtype = torch.float64 if width == 8 else torch.float32
    if model is None:
        examples = [_kept(one, [_EXAMPLE], dtype) for one in subgroups]
        mean = max(kept.by_shape[_EXAMPLE] for kept in examples) // prod(_EXAMPLE)
        return State(item=Item.OPTIMIZER, width=mean), 0
    groups = parameter_groups(recipe, model)
    sizes: dict[str, Bytes] = {}
    once: dict[str, Bytes] = {}
    for group, own in groups.recipes.items():
        shapes = groups.stepped_shapes(group, model)
        if shapes:
            kept = _kept(own, list(shapes.values()), dtype)
            sizes |= {name: kept.by_shape[shape] for name, shape in shapes.items()}
            once[own.optimizer.name] = kept.shared  # by class: several groups of one class share its tables
    return counted_state(sizes, model), sum(once.values())


def stated_states(
    name: str, arguments: Mapping[str, object], model: ModelGraph, *, is_wide: bool
) -> tuple[State | None, Bytes]:
    """(bytes of the states that an optimizer keeps for each trained parameter of a model, bytes each rank holds once).

    `name`: the optimizer's class; `arguments`: the arguments of its constructor; `is_wide`: parameters are float64.

    Raises:
        RecipeError: the states cannot be counted.
    """
    shapes = {p.name: p.shape for p in model.parameters if p.is_trainable}
    kept = kept_bytes(name, arguments, list(shapes.values()), torch.float64 if is_wide else torch.float32)
    return counted_state({key: kept.by_shape[shape] for key, shape in shapes.items()}, model), kept.shared


def with_optimizer(state: State | None, states: Sequence[State], rest: Rest = RESTS["device"]) -> tuple[State, ...]:
    """`states` with the optimizer's state replaced by `state`, in the form `rest`, in which it is kept between updates.

    None as `state` removes the optimizer's state.
    """
    others = [one for one in states if one.item is not Item.OPTIMIZER]
    # The optimizer's own state comes after parameters and gradients.
    place = sum(one.item in (Item.PARAMETERS, Item.GRADIENTS) for one in others)
    return (*others[:place], *(() if state is None else rest.kept(state)), *others[place:])


def counted_state(sizes: Mapping[str, Bytes], model: ModelGraph) -> State:
    """The optimizer's state from `sizes`: name of a parameter -> bytes of its states.

    Its width is their mean for each number, rounded down.
    """
    numbers = sum(prod(p.shape) for p in model.parameters if p.name in sizes)
    mean = sum(sizes.values()) // max(1, numbers)
    return State(item=Item.OPTIMIZER, width=mean, sizes=tuple(Sized(*one) for one in sorted(sizes.items())))


def _is_plain(recipe: Recipe) -> bool:
    return recipe.optimizer.rest is None and has_plain_states(recipe.optimizer.name)


def _kept(recipe: Recipe, shapes: list[Shape], dtype: torch.dtype) -> KeptStates:
    return kept_bytes(recipe.optimizer.name, recipe.optimizer.arguments, shapes, dtype)

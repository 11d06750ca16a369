"""The settings of a recipe's [lora] and [model] about adapters and the frozen weights beside them."""

import torch

from diffusionpipe.costs.forms import Form
from diffusionpipe.costs.graph import ATTENTION
from diffusionpipe.models.parameters.lora import LoraSettings
from diffusionpipe.models.parameters.lora_targets import Breadth, Targets
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.model_section import AdaptedLayers, FrozenStore, is_narrow_store, stored_form


def lora_of(recipe: Recipe) -> LoraSettings | None:
    """The settings of the adapters that a recipe trains; None where it trains whole components."""
    section = recipe.lora
    if section.rank is None:
        return None
    return LoraSettings(
        rank=section.rank,
        alpha=section.alpha,
        target_modules=_targets(section.target_modules),
        exclude=section.exclude,
        rank_pattern=section.rank_pattern,
        dora=section.dora,
        rank_stabilized=section.rank_stabilized,
    )


def _targets(stated: tuple[str, ...] | AdaptedLayers) -> Targets:
    if isinstance(stated, AdaptedLayers):
        return ATTENTION if stated is AdaptedLayers.ATTENTION else Breadth(stated.value)
    return stated or ATTENTION


def lora_identity(recipe: Recipe) -> str | None:
    """The facts about the adapters that must not change when a run continues, in words; None without adapters."""
    lora = lora_of(recipe)
    if lora is None:
        return None
    targets = lora.target_modules
    on = f"{targets} layers" if isinstance(targets, Breadth) else ", ".join(targets)
    parts = [f"rank {lora.rank}, alpha {lora.alpha_of(lora.rank):g}, on {on}"]
    parts += [f"but for {', '.join(lora.exclude)}"] if lora.exclude else []
    parts += [f"{end} of rank {rank}" for end, rank in sorted(lora.rank_pattern.items())]
    parts += ["DoRA"] * lora.dora + ["rank-stabilized"] * lora.rank_stabilized
    return ", ".join(parts)


def frozen_dtype_of(recipe: Recipe) -> torch.dtype | None:
    """The dtype of frozen linear layers and convolutions that are not stored in a form of their own.

    bfloat16 where the recipe stores frozen weights narrow, else None: the dtype of the trained weights.
    """
    return torch.bfloat16 if is_narrow_store(recipe.model.frozen_dtype) else None


def form_of(recipe: Recipe, component: str) -> Form | None:
    """The form in which the recipe stores a component's frozen linear layers, e.g. nf4; None for a dtype of torch."""
    return form_in(recipe.model.frozen_dtype, component)


def form_in(stated: FrozenStore, component: str) -> Form | None:
    """The form of a component's frozen linear layers by a stated `frozen_dtype`; None for a dtype of torch."""
    form = stored_form(stated, component)
    return None if form is None else Form(form.value)

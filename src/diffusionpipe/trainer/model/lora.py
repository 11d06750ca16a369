"""The settings of a recipe's [lora] and [model] about adapters and the frozen weights beside them."""

import torch

from diffusionpipe.models.parameters.lora import ATTENTION, LoraSettings
from diffusionpipe.trainer.recipe import FrozenDtype, Recipe


def lora_of(recipe: Recipe) -> LoraSettings | None:
    """The adapters that a recipe trains; None where it trains whole components."""
    section = recipe.lora
    if section.rank is None:
        return None
    return LoraSettings(rank=section.rank, alpha=section.alpha, target_modules=section.target_modules or ATTENTION)


def lora_identity(recipe: Recipe) -> str | None:
    """The facts about the adapters that must not change between a run and its continuation."""
    lora = lora_of(recipe)
    if lora is None:
        return None
    return f"rank {lora.rank}, alpha {lora.scale * lora.rank:g}, on {', '.join(lora.target_modules)}"


def frozen_dtype_of(recipe: Recipe) -> torch.dtype | None:
    """The dtype of frozen linear layers and convolutions; None for the dtype of the trained weights."""
    return torch.bfloat16 if recipe.model.frozen_dtype is FrozenDtype.BFLOAT16 else None

"""Low-rank adapters (Hu et al., 2022, https://arxiv.org/abs/2106.09685) through peft.

peft replaces linear layers in place, by modules that hold the old one as "base_layer" and two small trainable matrices.
The layers of a graph name whole blocks, so they find both; only trainability and the names of parameters change.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import ModelError

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of every attention of diffusers' denoisers."""

_FUSED = "to_qkv_mlp_proj"
"""FLUX.2's single-stream attention has one layer for its inputs, and "to_out" for its output."""

_LOADED = ("unet", "transformer")
"""Components whose adapters diffusers' pipelines save and load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The adapters as the recipe states them."""

    rank: int = 16
    alpha: float | None = None
    """Numerator of the factor alpha / rank with which the adapters are added; None for alpha = rank."""
    target_modules: tuple[str, ...] = ATTENTION
    """Ends of the names of the linear layers and convolutions that get an adapter; `ATTENTION` stands for all linear
    layers of attention, under any names."""

    @property
    def scale(self) -> float:
        """The factor of adapters' outputs before they are added."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ModelError(f"lora: rank {self.rank} must be at least 1, e.g. 16")
        if self.alpha is not None and self.alpha <= 0:
            raise ModelError(f"lora: alpha {self.alpha} must be positive, e.g. the rank, {self.rank}")
        if not self.target_modules:
            raise ModelError(f"lora: no target_modules; use e.g. {', '.join(ATTENTION)}")


def needs_peft(error: ImportError) -> ModelError:
    """The error where peft, or a package that it imports, is missing."""
    return ModelError(f"lora needs peft ({error}); install it with pip install 'diffusionpipe[lora]'")


def add_lora(components: Mapping[str, nn.Module], trained: str, settings: LoraSettings) -> None:
    """Adds adapters to the component `trained` and freezes all that it had before.

    The adapters' parameters are on the meta device, for `materialize` to initialise them by name: no output changes
    until the first step, because the second matrix is zero. Targets whose own weights are not to be trained get none:
    their results are never read, see `unread`.

    Raises ModelError without peft, for a class that takes no adapters, if a target names nothing or only layers that
    are never read, or for a rank that is larger than a layer.
    """
    component: Any = components[trained]
    if trained not in _LOADED or not hasattr(component, "add_adapter"):
        kind = type(component).__name__
        raise ModelError(f"lora: {refusal(Feature.LORA, Feature.DIT, trained=trained, kind=kind)}")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise needs_peft(error) from error
    names = [name for name, _ in component.named_modules()]
    targets = _targets(names, settings)
    unused = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unused:
        raise ModelError(
            f"lora: {trained} has no modules named {', '.join(unused)}; attention has {', '.join(ATTENTION)}"
        )
    unread = _check_targets(component, trained, targets, settings.rank)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        target_modules=list(targets),
        exclude_modules=unread or None,
    )
    with torch.device("meta"):  # nothing is drawn from the global generator
        component.add_adapter(config)
    for name, parameter in component.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def _targets(names: Collection[str], settings: LoraSettings) -> tuple[str, ...]:
    """Ends of the names of what gets an adapter in a component with modules of these names."""
    if settings.target_modules != ATTENTION:
        return settings.target_modules
    fused = [name.removesuffix(f".{_FUSED}") for name in names if name.endswith(f".{_FUSED}")]
    return (*ATTENTION, *(f"{attention}.{layer}" for attention in fused for layer in (_FUSED, "to_out")))


def _check_targets(component: nn.Module, trained: str, targets: Collection[str], rank: int) -> list[str]:
    """Refuses targets that take no adapter, and a rank that a layer is smaller than.

    Returns targets that are never read.
    """
    sides: dict[str, int] = {}
    unread: list[str] = []
    for name, module in component.named_modules():
        if not any(name == target or name.endswith(f".{target}") for target in targets):
            continue
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise ModelError(
                f"lora: {trained}.{name} is a {type(module).__name__}; name linear layers or convolutions in "
                f"target_modules, e.g. {', '.join(ATTENTION)}"
            )
        if module.weight.requires_grad:
            sides[name] = min(module.weight.shape[:2])
        else:
            unread.append(name)
    if not sides:
        raise ModelError(
            f"lora: nothing depends on what {', '.join(unread)} of {trained} give; name other target_modules, e.g. "
            f"{', '.join(ATTENTION)}"
        )
    smallest = min(sides, key=lambda name: sides[name])
    if rank > sides[smallest]:
        raise ModelError(
            f"lora: rank {rank} is larger than {trained}.{smallest}, whose smaller side is {sides[smallest]}; "
            f"use at most {sides[smallest]}, or leave that layer out of target_modules"
        )
    return unread


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of that name belongs to an adapter."""
    return ".lora_A." in name or is_second_matrix(name)


def is_second_matrix(name: str) -> bool:
    """Whether it belongs to the matrix that starts as zero."""
    return ".lora_B." in name


def stored_name(name: str) -> str:
    """The name under which a model without adapters holds that parameter."""
    return name.replace(".base_layer.", ".")

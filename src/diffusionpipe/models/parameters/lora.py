"""Low-rank adapters (Hu et al., 2022, https://arxiv.org/abs/2106.09685) through peft.

peft replaces linear layers in place, by modules that hold the old one as "base_layer" and two small trainable matrices.
The layers of a graph name whole blocks, so they find both; only trainability and the names of parameters change.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs.graph import ATTENTION
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import LayerGraph, own_parameters
from diffusionpipe.models.parameters.adapter_names import Adapter
from diffusionpipe.models.parameters.lora_targets import (
    Breadth,
    Targets,
    ends_with,
    is_text_encoder,
    layers_to_adapt,
)

DENOISERS = ("unet", "transformer")
"""The components that are denoisers whose adapters diffusers' pipelines save and load."""
_MAGNITUDE = ".lora_magnitude_vector."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The settings of low-rank adapters (LoRA), as the recipe's section `lora` states them."""

    rank: int = 16
    """The rank of adapters, but for layers in `rank_pattern`."""
    alpha: float | None = None
    """Numerator of the factor alpha / rank with which the adapters are added; None for alpha = rank."""
    target_modules: Targets = ATTENTION
    """Ends of the names of the linear layers and convolutions that get an adapter, or a word; `ATTENTION` stands for
    all linear layers of attention, under any names."""
    exclude: tuple[str, ...] = ()
    """Ends of the names of layers among the targets that get no adapter."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """End of layers' names -> their rank; the longest end that fits a name holds. Their alphas change too, so that
    all adapters have the same `scale`."""
    dora: bool = False
    """Whether the norm of each row of a weight is trained apart from its direction (DoRA)."""
    rank_stabilized: bool = False
    """Whether the factor is alpha / sqrt(rank)."""

    @property
    def scale(self) -> float:
        """The factor by which the output of every adapter is multiplied: alpha / rank, or alpha / sqrt(rank)."""
        if self.rank_stabilized:
            return self.alpha_of(self.rank) / sqrt(self.rank)
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def rank_of(self, name: str) -> int:
        """The rank of the adapter of the layer with this name: by the longest end in `rank_pattern`, else `rank`."""
        end = ends_with(name, self.rank_pattern)
        return self.rank if end is None else self.rank_pattern[end]

    def alpha_of(self, rank: int) -> float:
        """The alpha with which an adapter of this rank has the scale of all others."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha * (sqrt(rank / self.rank) if self.rank_stabilized else rank / self.rank)

    def __post_init__(self) -> None:
        for key, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if rank < 1:
                raise ModelError(f"lora: {key} {rank} must be at least 1, e.g. 16")
        if self.alpha is not None and self.alpha <= 0:
            raise ModelError(f"lora: alpha {self.alpha} must be positive, e.g. the rank, {self.rank}")
        if not self.target_modules:
            raise ModelError(f"lora: no target_modules; use e.g. {', '.join(ATTENTION)}")


def needs_peft(error: ImportError) -> ModelError:
    """The error for the user if peft, or a package that it imports, cannot be imported."""
    return ModelError(f"lora needs peft ({error}); install it with pip install peft")


def adapt(graph: LayerGraph, chosen: Collection[str], settings: LoraSettings) -> None:
    """Add adapters to the chosen components of a graph and freeze all other parameters; see `add_lora`.

    A text encoder may be frozen before. Its layers get adapters if some layer of the graph uses them, which is not so
    for the last layer of SDXL's first encoder.

    Raises ModelError for the same reasons as `add_lora`.
    """
    for name, component in graph.components.items():
        if name not in chosen:
            component.requires_grad_(False)
        elif is_text_encoder(type(component).__name__):
            for layer in graph.layers:
                for parameter in own_parameters(layer, component) if layer.component == name else ():
                    parameter.requires_grad_(True)
    add_lora(graph.components, chosen, settings)


def add_lora(components: Mapping[str, nn.Module], trained: str | Collection[str], settings: LoraSettings) -> None:
    """Add adapters to the components `trained`, one name or several, and freeze all parameters that they had before.

    The adapters' parameters are on the meta device, for `materialize` to initialise them by name: no output changes
    until the first step, because the second matrix is zero. Targets whose own weights need no gradient get no adapter:
    their results are never read, see `unread`.

    Raises ModelError without peft, for a class that takes no adapters, if a target names nothing or only layers that
    are never read, or for a rank that is larger than a layer.
    """
    names = (trained,) if isinstance(trained, str) else tuple(trained)
    for name in names:
        kind = type(components[name]).__name__
        if not is_text_encoder(kind) and (name not in DENOISERS or not hasattr(components[name], "add_adapter")):
            raise ModelError(f"lora: {refusal(Feature.LORA, Feature.DIT, trained=name, kind=kind)}")
    layers = layers_to_adapt({name: components[name] for name in names}, settings.target_modules, settings.exclude)
    unused = [
        end for end in settings.rank_pattern if not any(ends_with(n, (end,)) for own in layers.values() for n in own)
    ]
    if unused:
        raise ModelError(f"lora: no layer with an adapter has a name that ends as in rank_pattern: {', '.join(unused)}")
    for name, own in layers.items():
        ranks = {layer: settings.rank_of(layer) for layer in own}
        _check_ranks(name, own, ranks, settings)
        alphas = {layer: settings.alpha_of(rank) for layer, rank in ranks.items()}
        inject(components[name], ranks, alphas, dora=settings.dora, rank_stabilized=settings.rank_stabilized)
        for parameter_name, parameter in components[name].named_parameters():
            parameter.requires_grad_(is_adapter(parameter_name))


def inject(
    component: nn.Module,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    *,
    dora: bool = False,
    rank_stabilized: bool = False,
) -> None:
    """Put adapters on the meta device into a component.

    `ranks`, `alphas`: name of each layer that gets an adapter -> its rank, its alpha. `dora`, `rank_stabilized`: as in
    `LoraSettings`.

    Raises ModelError without peft.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise needs_peft(error) from error
    # Anchored: peft would else also find the pattern at the end of longer names.
    exact = {layer: f"^{re.escape(layer)}" for layer in ranks}
    # peft has one rank and a table of exceptions: the most common rank keeps the table short.
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = [layer for layer, rank in ranks.items() if rank != usual]
    config = LoraConfig(
        r=usual,
        lora_alpha=next(alphas[layer] for layer, rank in ranks.items() if rank == usual),
        target_modules=f"({'|'.join(map(re.escape, ranks))})",  # whole names: an end may fit other layers too
        rank_pattern={exact[layer]: ranks[layer] for layer in others},
        alpha_pattern={exact[layer]: alphas[layer] for layer in others},
        use_dora=dora,
        use_rslora=rank_stabilized,
    )
    library_module: Any = component
    with torch.device("meta"):  # nothing is drawn from the global generator
        library_module.add_adapter(config)


def _check_ranks(
    component: str, layers: Mapping[str, nn.Module], ranks: Mapping[str, int], settings: LoraSettings
) -> None:
    """Check that no rank in `ranks` is larger than the smaller side of its layer. Raises ModelError if one is."""
    sides = {name: min(layer.weight.shape[:2]) for name, layer in layers.items()}  # type: ignore[index]
    worst = min(sides, key=lambda name: sides[name] - ranks[name])
    if ranks[worst] > sides[worst]:
        is_word = isinstance(settings.target_modules, Breadth)
        way = "name it in lora.exclude" if is_word else "leave that layer out of target_modules"
        raise ModelError(
            f"lora: rank {ranks[worst]} is larger than {component}.{worst}, whose smaller side is {sides[worst]}; "
            f"use at most {sides[worst]}, or {way}"
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of that name belongs to an adapter."""
    return ".lora_A." in name or is_second_matrix(name) or is_magnitude(name)


def is_second_matrix(name: str) -> bool:
    """Whether a parameter of that name is an adapter's second matrix, which starts as zero."""
    return ".lora_B." in name


def is_magnitude(name: str) -> bool:
    """Whether a parameter of that name holds the norms that DoRA trains, one for each row of a weight."""
    return _MAGNITUDE in name


def adapted_layers(component: nn.Module) -> dict[str, int]:
    """Name of each layer of the component that has an adapter -> rank of the adapter."""
    end = ".lora_A.default.weight"
    return {name.removesuffix(end): len(p) for name, p in component.named_parameters() if name.endswith(end)}


def parameters_of(layer: str, adapter: Adapter) -> dict[str, Tensor]:
    """Name in the component, e.g. "<layer>.lora_A.default.weight" -> tensor, of the parameters of an adapter."""
    found = {f"{layer}.lora_A.default.weight": adapter.down, f"{layer}.lora_B.default.weight": adapter.up}
    if adapter.magnitude is not None:
        found[f"{layer}{_MAGNITUDE}default.weight"] = adapter.magnitude
    return found


def stored_name(name: str) -> str:
    """The name of a parameter without ".base_layer", under which a model without adapters holds it."""
    return name.replace(".base_layer.", ".")

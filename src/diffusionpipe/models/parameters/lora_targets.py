"""Layers that get an adapter: linear layers and convolutions of a denoiser or of a text encoder, by their names."""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from torch import nn

from diffusionpipe.costs.graph import ATTENTION
from diffusionpipe.errors import ModelError

_FUSED = "to_qkv_mlp_proj"
"""The name of the one layer for all inputs in FLUX.2's single-stream attention; its output layer is "to_out"."""

_CLIP = (("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2"))
_T5 = (("q", "k", "v", "o"), ("wi", "wi_0", "wi_1", "wo"))
_ENCODERS = {"CLIPTextModel": _CLIP, "CLIPTextModelWithProjection": _CLIP, "T5EncoderModel": _T5}
"""Class of a text encoder -> ends of the names of the linear layers in its blocks: (attention's, the others')."""
_LISTED = 3
"""The most names that an error message lists."""


class Breadth(StrEnum):
    """A word of `lora.target_modules` in place of layers' names: all linear layers, or all layers."""

    LINEAR = "linear"
    """All linear layers."""
    ALL = "all"
    """All linear layers and convolutions."""


_KINDS: Mapping[Breadth, tuple[type[nn.Module], ...]] = {
    Breadth.LINEAR: (nn.Linear,),
    Breadth.ALL: (nn.Linear, nn.Conv2d),
}

Targets = tuple[str, ...] | Breadth
"""The layers that get an adapter: the ends of their names, or a word for many. `ATTENTION` stands for all linear layers
of attention, under any names."""


def is_text_encoder(kind: str) -> bool:
    """Whether text encoders of the class with this name can have adapters."""
    return kind in _ENCODERS


def layers_to_adapt(
    components: Mapping[str, nn.Module], targets: Targets, exclude: Collection[str]
) -> dict[str, dict[str, nn.Module]]:
    """Component -> name -> layer, of the layers that get an adapter.

    `exclude`: ends of the names of layers that get none. Layers whose own weights need no gradient get none either:
    their results are never read, see `unread`.

    Raises ModelError for a target or an exclusion that names nothing, for layers that take no adapter, and for a
    component that would have none.
    """
    named = {name: _named(module, targets) for name, module in components.items()}
    if not isinstance(targets, Breadth) and targets != ATTENTION:
        names = {name: [path for path, _ in module.named_modules()] for name, module in components.items()}
        _check_named("modules", targets, names)
    _check_named("layers with adapters", exclude, named)
    return {name: _checked(name, components[name], found, targets, exclude) for name, found in named.items()}


def ends_with(name: str, ends: Iterable[str]) -> str | None:
    """The longest of `ends` with which the dotted name ends, in whole parts; None if it ends with none.

    >>> ends_with("mid.attn.to_q", ["to_q", "attn.to_q", "o_q"])
    'attn.to_q'
    """
    return max((end for end in ends if name == end or name.endswith(f".{end}")), key=len, default=None)


def _named(module: nn.Module, targets: Targets) -> dict[str, nn.Module]:
    """Name -> module, of the modules of one component that the targets name."""
    kind, layers = type(module).__name__, dict(module.named_modules())
    if isinstance(targets, Breadth) and kind not in _ENCODERS:
        return {name: layer for name, layer in layers.items() if isinstance(layer, _KINDS[targets])}
    ends = targets if isinstance(targets, tuple) else ()
    if kind in _ENCODERS and (targets == ATTENTION or isinstance(targets, Breadth)):
        attention, others = _ENCODERS[kind]
        ends = attention if targets == ATTENTION else (*attention, *others)
    elif targets == ATTENTION:
        # "to_out" alone would also fit the list of modules that other attention has under this name.
        fused = [name.removesuffix(f".{_FUSED}") for name in layers if name.endswith(f".{_FUSED}")]
        ends = (*ATTENTION, *(f"{attention}.{layer}" for attention in fused for layer in (_FUSED, "to_out")))
    return {name: layer for name, layer in layers.items() if ends_with(name, ends)}


def _check_named(what: str, ends: Iterable[str], names: Mapping[str, Collection[str]]) -> None:
    """Check that a name of some component ends with each of `ends`.

    `names`: component -> its names. `what`: the kind of things with these names, for errors.

    Raises:
        ModelError: no name has one of the ends.
    """
    unused = [end for end in ends if not any(ends_with(name, (end,)) for own in names.values() for name in own)]
    if unused:
        has = "has" if len(names) == 1 else "have"
        usual = dict.fromkeys((*ATTENTION, *(_CLIP[0] if len(names) > 1 else ())))
        raise ModelError(
            f"lora: {' and '.join(names)} {has} no {what} named {', '.join(unused)}; attention has {', '.join(usual)}"
        )


def _checked(
    component: str, module: nn.Module, named: Mapping[str, nn.Module], targets: Targets, exclude: Collection[str]
) -> dict[str, nn.Module]:
    """Name -> layer, of the layers among `named` that get an adapter: they are read and not excluded.

    Raises:
        ModelError: there are none, or one is neither linear nor a convolution.
    """
    usual = _ENCODERS.get(type(module).__name__, (ATTENTION,))[0]
    chosen = {name: layer for name, layer in named.items() if not ends_with(name, exclude)}
    if not chosen:
        why = "lora.exclude leaves none of its layers" if named else "the target_modules name none of its layers"
        raise ModelError(
            f"lora: {component} would have no adapter, because {why}; its attention has {', '.join(usual)}"
        )
    for name, layer in chosen.items():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            raise ModelError(
                f"lora: {component}.{name} is a {type(layer).__name__}; name linear layers or convolutions in "
                f"target_modules, e.g. {', '.join(usual)}"
            )
    read = {name: layer for name, layer in chosen.items() if layer.weight.requires_grad}
    if not read:
        first = ", ".join(list(chosen)[:_LISTED]) + (f" and {more} more" if (more := len(chosen) - _LISTED) > 0 else "")
        raise ModelError(
            f"lora: nothing depends on what {first} of {component} give; name other target_modules, e.g. "
            f"{', '.join(usual)}"
        )
    return read

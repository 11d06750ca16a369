"""Adapters in the file that diffusers' pipelines write and read."""

import json
import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names import Adapter
from diffusionpipe.models.parameters.lora import DENOISERS, LoraSettings, inject, is_second_matrix
from diffusionpipe.models.parameters.stored import opened

ADAPTERS = "pytorch_lora_weights.safetensors"
_DOWN, _UP, _NORMS = "lora_A", "lora_B", "lora_magnitude_vector"
_ALPHA = ".alpha"


def save_adapters(
    adapters: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    modules: Mapping[str, nn.Module],
    settings: LoraSettings,
) -> None:
    """Writes the adapters of components as diffusers' `load_lora_weights(folder)` reads them; see `adapter_tensors`."""
    from safetensors.torch import save_file

    save_file(adapter_tensors(adapters, modules, settings), folder / ADAPTERS, metadata={"format": "pt"})


def adapter_tensors(
    adapters: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module], settings: LoraSettings
) -> dict[str, Tensor]:
    """The tensors of diffusers' file, from the adapters of components by their names in these.

    Where the scale is not 1, the second matrices are scaled instead: the file then needs no alpha, and readers that
    know of none add the same. diffusers overlooks those of a T5 in this file, which `load_adapters` reads.
    """
    from peft import get_peft_model_state_dict

    stored: dict[str, Tensor] = {}
    for component, own in adapters.items():
        module = modules[component]
        scaled = {
            name: (tensor * settings.scale if is_second_matrix(name) else tensor).contiguous()
            for name, tensor in own.items()
        }
        state = get_peft_model_state_dict(module, scaled)
        if component == "unet" and not settings.dora:
            # The names that its files have had longest. All: of a mixture diffusers reads the kind of the first.
            state = {
                name.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up."): t for name, t in state.items()
            }
        elif component not in DENOISERS:  # transformers would look for no norms without this end
            state = {f"{name}.weight" if name.endswith(f".{_NORMS}") else name: t for name, t in state.items()}
        start = f"{component}."
        if type(module).__name__ == "CLIPTextModel" and not hasattr(module, "text_model"):
            start += "text_model."  # transformers 5.6 left it out, and every other program has it
        stored |= {start + name: tensor for name, tensor in state.items()}
    return stored


def layer_adapters(adapters: Mapping[str, Tensor], settings: LoraSettings) -> dict[str, Adapter]:
    """A component's adapters by layer, from its tensors under peft's names."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapters.items():
        layer, _, kind = name.partition(".lora_")
        found.setdefault(layer, {})["lora_" + kind.partition(".")[0]] = tensor
    return {
        layer: Adapter(down=own[_DOWN], up=own[_UP], scale=settings.scale, magnitude=own.get(_NORMS))
        for layer, own in found.items()
    }


def adapted_components(folder: Path) -> tuple[str, ...]:
    """The components that a folder's file has adapters of. Raises ModelError if it cannot be read."""
    with opened(folder / ADAPTERS) as tensors:
        return tuple(dict.fromkeys(name.partition(".")[0] for name in tensors.names()))


def load_adapters(module: nn.Module, folder: Path, component: str) -> None:
    """Adds the adapters that a folder's file has for this component, in float32, or replaces their values.

    Adapters of layers without values stay without.

    Raises:
        ModelError: the file has none, they do not fit, or peft is missing.
    """
    path = folder / ADAPTERS
    found = _stored_adapters(path, component, module)
    if not found:
        raise ModelError(f"{path} holds no adapters of {component}; it belongs to another kind of model")
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    layers = {name: linears.get(name, linears.get(f"{name}.base_layer")) for name in found}
    if unknown := [name for name, layer in layers.items() if layer is None]:
        raise ModelError(
            f"the adapters of {path} do not fit {component}: it has layers for {len(found) - len(unknown)} of "
            f"{len(found)}; was it trained from another model?"
        )
    for name, layer in layers.items():
        assert layer is not None
        sizes = (found[name][_UP].shape[0], *found[name][_DOWN].shape[1:])
        if sizes != tuple(layer.weight.shape):
            raise ModelError(
                f"the adapters of {path} do not fit {component}: {name} has the shape {tuple(layer.weight.shape)}, "
                f"and its adapter is for {sizes}"
            )
    if not getattr(module, "_hf_peft_config_loaded", False):
        ranks = {name: len(own[_DOWN]) for name, own in found.items()}
        inject(module, ranks, {name: float(rank) for name, rank in ranks.items()}, dora=_has_norms(found))
    for name, own in found.items():
        for end, tensor in own.items():
            holder: Any = module.get_submodule(f"{name}.{end}.default")
            base = layers[name]
            assert base is not None
            if not base.weight.is_meta:
                value = tensor.to(base.weight.device, torch.promote_types(base.weight.dtype, torch.float32))
                holder.weight = nn.Parameter(value, requires_grad=False)


def has_norms(folder: Path) -> bool:
    """Whether a folder's file has norms of DoRA."""
    with opened(folder / ADAPTERS) as tensors:
        return any(_NORMS in name for name in tensors.names())


def merge_adapters(module: nn.Module) -> None:
    """Adds the adapters of a module with real weights to these; the module is then as if it had none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            module.set_submodule(name, layer.get_base_layer())
    library_module: Any = module
    library_module._hf_peft_config_loaded = False  # else save_pretrained looks for adapters
    del library_module.peft_config


def _has_norms(found: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return any(_NORMS in own for own in found.values())


def _stored_adapters(path: Path, component: str, module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The component's adapters by layer, each under peft's names, with their scales in the second matrices.

    U-Nets' files have older names. Some programs store an alpha beside the matrices, and diffusers the settings of all.
    """
    stored: dict[str, Tensor] = {}
    with opened(path) as tensors:
        for name in tensors.names():
            if name.startswith(f"{component}."):
                plain = name.removeprefix(f"{component}.")
                if not hasattr(module, "text_model"):
                    plain = plain.removeprefix("text_model.")
                plain = plain.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B.")
                stored[plain] = tensors.get(name)
        settings = _settings(tensors.metadata().get("lora_adapter_metadata"), component)
    alphas = {name.removesuffix(_ALPHA): stored.pop(name).item() for name in list(stored) if name.endswith(_ALPHA)}
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        layer, _, end = name.removesuffix(".weight").rpartition(".")
        found.setdefault(layer, {})[end] = tensor
    for layer, own in found.items():
        if not {_DOWN, _UP} <= own.keys():
            raise ModelError(f"{path}: the adapter of {component}.{layer} lacks a matrix; get the file again")
        rank = own[_UP].shape[1]
        scale = alphas[layer] / rank if layer in alphas else _scale(settings if not alphas else {}, layer, rank)
        own[_UP] = own[_UP] * scale
    return found


def _settings(described: str | None, component: str) -> dict[str, Any]:
    """What diffusers has written about the adapters of a component: the settings of peft."""
    start, settings = f"{component}.", json.loads(described or "{}")
    return {key.removeprefix(start): value for key, value in settings.items() if key.startswith(start)}


def _scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """The factor of an adapter by the settings of peft."""
    if "lora_alpha" not in settings:
        return 1.0
    patterns = settings.get("alpha_pattern") or {}
    fitting = (alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
    alpha = float(next(fitting, settings["lora_alpha"]))
    return alpha / (sqrt(rank) if settings.get("use_rslora") else rank)

"""Adapters in the file that diffusers' pipelines write and read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names import Adapter, from_foreign, scaled
from diffusionpipe.models.parameters.lora import DENOISERS, LoraSettings, inject, is_second_matrix, parameters_of
from diffusionpipe.models.parameters.lora_read import ADAPTERS, read_adapters
from diffusionpipe.models.parameters.stored import opened

_NORMS = "lora_magnitude_vector"


def save_adapters(
    adapters: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    modules: Mapping[str, nn.Module],
    settings: LoraSettings,
) -> None:
    """Write the adapters of components into a folder, as diffusers' `load_lora_weights(folder)` reads them.

    `adapters`: component -> peft's name -> tensor. `modules`: component -> module. See `adapter_tensors`.
    """
    from safetensors.torch import save_file

    save_file(adapter_tensors(adapters, modules, settings), folder / ADAPTERS, metadata={"format": "pt"})


def adapter_tensors(
    adapters: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module], settings: LoraSettings
) -> dict[str, Tensor]:
    """Name -> tensor of the file of adapters that diffusers loads.

    `adapters`: component -> name in it -> tensor. The second matrices are multiplied by the scale of `settings`: the
    file then needs no alpha, and readers that look for none add the same. diffusers overlooks adapters of a T5 in
    this file; `load_adapters` reads them.
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
    """Name of a layer -> its adapter, for one component, from the tensors under peft's names."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapters.items():
        layer, _, kind = name.partition(".lora_")
        found.setdefault(layer, {})["lora_" + kind.partition(".")[0]] = tensor
    return {
        layer: Adapter(down=own["lora_A"], up=own["lora_B"], scale=settings.scale, magnitude=own.get(_NORMS))
        for layer, own in found.items()
    }


def adapted_components(folder: Path) -> tuple[str, ...]:
    """The names of the components for which a folder's file has adapters. Raises ModelError if it cannot be read."""
    with opened(folder / ADAPTERS) as tensors:
        return tuple(dict.fromkeys(name.partition(".")[0] for name in tensors.names()))


def load_adapters(module: nn.Module, folder: Path, component: str) -> None:
    """Put the adapters that a folder's file has for a component into `module`, in float32 at least.

    Adapters that the module has already get the file's values. If its weights are on the meta device, adapters get no
    values.

    Raises:
        ModelError: the file has no adapters of the component, they do not fit, or peft is missing.
    """
    stored = read_adapters(folder / ADAPTERS)
    own = stored.only(component)
    if not own:
        raise ModelError(f"{stored.file} holds no adapters of {component}; it belongs to another kind of model")
    try:
        kind = type(module).__name__
        found = from_foreign(own, {component: module}, pipeline=kind, scale=stored.scale)[component]
    except ModelError as error:
        raise ModelError(f"the adapters of {stored.file} do not fit {component}: {error}") from error
    if not getattr(module, "_hf_peft_config_loaded", False):
        ranks = {layer: adapter.rank for layer, adapter in found.items()}
        dora = any(adapter.magnitude is not None for adapter in found.values())
        inject(module, ranks, {layer: float(rank) for layer, rank in ranks.items()}, dora=dora)
    # In float32 at least, also on narrow weights.
    for layer, adapter in found.items():
        base = next(module.get_submodule(f"{layer}.base_layer").parameters())
        for name, value in parameters_of(layer, scaled(adapter)).items():
            holder: Any = module.get_submodule(name.removesuffix(".weight"))
            if not base.is_meta:
                wide = value.to(base.device, torch.promote_types(base.dtype, torch.float32))
                holder.weight = nn.Parameter(wide, requires_grad=False)


def has_norms(folder: Path) -> bool:
    """Whether a folder's file of adapters has norms of DoRA. Raises ModelError if it cannot be read."""
    with opened(folder / ADAPTERS) as tensors:
        return any(_NORMS in name for name in tensors.names())


def merge_adapters(module: nn.Module) -> None:
    """Add the products of a module's adapters to its weights, which are real, and remove the adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            module.set_submodule(name, layer.get_base_layer())
    library_module: Any = module
    library_module._hf_peft_config_loaded = False  # else save_pretrained looks for adapters
    del library_module.peft_config

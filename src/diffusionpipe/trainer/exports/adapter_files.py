"""Writes the files of trained adapters: in each format with its names, in the wanted dtype, with a header of facts."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.files.output_file import write_durably
from diffusionpipe.models.parameters.adapter_names import FORMS, Weights, to_foreign
from diffusionpipe.models.parameters.lora_file import adapter_tensors, layer_adapters
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.trainer.exports.adapter_header import AdapterFacts, header
from diffusionpipe.trainer.recipe.model_section import AdapterFormat, LoraSection

_ALPHA = ".alpha"


def write_adapter_files(
    adapters: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    modules: Mapping[str, nn.Module],
    facts: AdapterFacts,
    weights: Weights,
) -> None:
    """Writes the files of trained adapters into a folder, one file in each format that the recipe names.

    `adapters`: the matrices by component and by their names in it. `modules`: the components. `weights`: reads weights
    of the base model, for adapters that are written as differences. The file in diffusers' format is the one that
    `load_lora_weights(folder)` finds: scales are multiplied in, alpha is the rank. The file for ComfyUI is
    NAME.safetensors, the name that its lists show.

    Raises:
        ModelError: a layer has no name in a format, or a number is too large for the wanted dtype.
        OSError: a file cannot be written.
    """
    # Adapters of no recipe have the defaults.
    section = LoraSection(rank=facts.settings.rank) if facts.recipe is None else facts.recipe.lora
    dtype = None if section.save_dtype is None else getattr(torch, section.save_dtype)
    tensors = stored_as(dtype, adapter_tensors(adapters, modules, facts.settings))
    # Not by save_file, whose errors of a full disk are no OSError, and whose files their owner alone can read.
    write_durably(folder / ADAPTERS, save(tensors, header(facts, tensors, has_alpha=False, is_original=False)))
    if AdapterFormat.COMFY in section.formats:
        layers = {component: layer_adapters(own, facts.settings) for component, own in adapters.items()}
        tensors = stored_as(dtype, to_foreign(layers, modules, pipeline=facts.pipeline, weights=weights))
        has_alpha, is_original = any(name.endswith(_ALPHA) for name in tensors), FORMS[facts.pipeline].is_original
        written = header(facts, tensors, has_alpha=has_alpha, is_original=is_original)
        write_durably(folder / comfy_file(facts.name), save(tensors, written))


def comfy_file(name: str) -> str:
    """The name of the file of adapters for ComfyUI, "NAME.safetensors"."""
    return f"{name}.safetensors"


def stored_as(dtype: torch.dtype | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors converted to `dtype`, or unchanged if it is None; alphas, which are single numbers, stay as they are.

    Raises:
        ModelError: a number becomes infinite in this type.
    """
    stored = {
        name: (tensor if dtype is None or name.endswith(_ALPHA) else tensor.to(dtype)).contiguous()
        for name, tensor in tensors.items()
    }
    # Numbers that were infinite before are another fault.
    lost = [name for name, tensor in stored.items() if not tensor.isfinite().all() and tensors[name].isfinite().all()]
    if lost:
        raise ModelError(
            f"lora.save_dtype: {lost[0]} has numbers beyond what {str(dtype).removeprefix('torch.')} can hold; set it "
            'to "bfloat16", and start the run again with --resume latest, which exports what it has trained'
        )
    return stored

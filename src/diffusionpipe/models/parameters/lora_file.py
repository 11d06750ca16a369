"""Adapters in the file that diffusers' pipelines write and read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.lora import LoraSettings, is_second_matrix, needs_peft
from diffusionpipe.models.parameters.narrow_weights import as_float32

ADAPTERS = "pytorch_lora_weights.safetensors"
_SECOND = ".lora_B.weight"
_ALPHA = ".alpha"


def save_adapters(
    adapters: Mapping[str, Tensor],
    folder: Path,
    module: nn.Module,
    component: str,
    settings: LoraSettings,
    *,
    pipeline: str,
) -> None:
    """Writes adapters by their names in `module`, which has some, as `pipeline.load_lora_weights(folder)` reads them.

    Where alpha is not the rank, the second matrices are scaled instead: the file then needs no alpha, and readers that
    know of none add the same.
    """
    import diffusers
    from peft import get_peft_model_state_dict

    scaled = {
        name: (tensor * settings.scale if is_second_matrix(name) else tensor).contiguous()
        for name, tensor in adapters.items()
    }
    state = get_peft_model_state_dict(module, scaled)
    if component == "unet":
        # The names that its files have had longest. All of them: of a mixture diffusers reads the kind of the first.
        state = {
            name.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up."): t for name, t in state.items()
        }
    getattr(diffusers, pipeline).save_lora_weights(folder, **{f"{component}_lora_layers": state})


def load_adapters(module: nn.Module, folder: Path, component: str) -> None:
    """Adds the adapters that a folder's file has for this component, in float32; the module's weights must be real.

    Raises:
        ModelError: the file has none, they do not fit, or peft is missing.
    """
    from safetensors import SafetensorError

    path = folder / ADAPTERS
    library_module: Any = module
    try:
        stored, described = _stored_adapters(path, component)
        if not stored:
            raise ModelError(f"{path} holds no adapters of {component}; it belongs to another kind of model")
        with as_float32(module):
            library_module.load_lora_adapter(stored, prefix=component, metadata=described)
    except ImportError as error:
        raise needs_peft(error) from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"the adapters of {path} do not fit {component}: {error}") from error
    # diffusers only warns of adapters for which the model has no layer.
    num_stored = sum(name.endswith(_SECOND) for name in stored)
    num_read = sum(is_second_matrix(name) for name, _ in module.named_parameters())
    if num_read < num_stored:
        raise ModelError(
            f"the adapters of {path} do not fit {component}: it has layers for {num_read} of {num_stored}; was it "
            "trained from another model?"
        )


def _stored_adapters(path: Path, component: str) -> tuple[dict[str, Tensor], Any]:
    """The component's adapters under peft's names, and the file's settings of them; None if there are none.

    U-Nets' files have older names. diffusers reads those too, but of a mixture only the first's kind. Some programs
    store an alpha beside the matrices, which is multiplied into the second one here.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = {
            name.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B."): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
            if name.startswith(f"{component}.")
        }
        described = (file.metadata() or {}).get("lora_adapter_metadata")  # by diffusers: the settings for peft
    alphas = {name: stored.pop(name) for name in list(stored) if name.endswith(_ALPHA)}
    for name, alpha in alphas.items():
        second = name.removesuffix(_ALPHA) + _SECOND
        stored[second] = stored[second] * (alpha.item() / stored[second].shape[1])
    return stored, json.loads(described) if described and not alphas else None

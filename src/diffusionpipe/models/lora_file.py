"""Adapters in the file that diffusers' pipelines write and read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.lora import LoraSettings, is_second_matrix
from diffusionpipe.models.narrow_weights import appearing_wide

ADAPTERS = "pytorch_lora_weights.safetensors"
_SECOND = (".lora_B.weight", ".lora.up.weight")
"""Ends of the names of second matrices."""


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
        ModelError: the file has none, they do not fit, diffusers does not read all of them, or peft is missing.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / ADAPTERS
    try:
        with safe_open(path, framework="pt") as file:
            own = [name for name in file.keys() if name.startswith(f"{component}.")]  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not own:
        raise ModelError(f"{path} holds no adapters of {component}; it belongs to another kind of model")
    library_module: Any = module
    try:
        with appearing_wide(module):
            library_module.load_lora_adapter(folder, prefix=component, weight_name=ADAPTERS)
    except ImportError as error:
        raise ModelError("lora needs peft; install it with pip install 'diffusionpipe[lora]'") from error
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the adapters of {path} do not fit {component}: {error}") from error
    stored = sum(name.endswith(_SECOND) for name in own)
    read = sum(is_second_matrix(name) for name, _ in module.named_parameters())
    if read < stored:
        raise ModelError(
            f"{path} holds {stored} adapters of {component}, of which diffusers reads {read}: their names are of "
            "several kinds; rename those with .lora.down and .lora.up to .lora_A and .lora_B"
        )

"""Files of adapters as diffusers, peft, kohya's scripts and ComfyUI write them: tensors, and the settings beside them.

pytorch_lora_weights.safetensors    diffusers: settings of peft in the header, or none
adapter_model.safetensors           peft: settings in adapter_config.json beside it
any other .safetensors              kohya, ComfyUI: an alpha beside each pair of matrices, or none
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.models.parameters.stored import opened

ADAPTERS = "pytorch_lora_weights.safetensors"
PEFT = "base_model.model."
"""The start of all names in a file of peft; the names do not contain the component."""
_OF_PEFT = "adapter_model"
_CONFIG = "adapter_config.json"
_HEADER = "lora_adapter_metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapters:
    """The tensors and the settings of a file of adapters."""

    file: Path
    """The path of the file."""
    tensors: Mapping[str, Tensor]
    """Name in the file -> tensor."""
    settings: Mapping[str, Any]
    """Key -> setting of peft. A key begins with the component, e.g. "unet.lora_alpha", but not in peft's own files."""

    def scale(self, component: str, layer: str, rank: int) -> float:
        """The scale of a layer's adapter of this rank by the file's settings; 1 if they have no alpha.

        It is for adapters without an alpha tensor.
        """
        start = f"{component}." if f"{component}.lora_alpha" in self.settings else ""
        alpha = self.settings.get(f"{start}lora_alpha")
        if alpha is None:
            return 1.0
        patterns = self.settings.get(f"{start}alpha_pattern") or {}
        # peft's own rule: a pattern is the end of a name, from a dot on.
        fitting = (own for pattern, own in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
        return float(next(fitting, alpha)) / (sqrt(rank) if self.settings.get(f"{start}use_rslora") else rank)

    def only(self, component: str) -> Mapping[str, Tensor]:
        """Name in the file -> tensor, for names that begin with the component's name and a dot."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(f"{component}.")}


def adapter_file(place: Path) -> Path:
    """The path of a file of adapters: `place` itself, or the file in this folder of diffusers, of peft or of a run.

    Raises ModelError if there is none, or a folder holds several.
    """
    if place.is_file():
        return place
    if not place.is_dir():
        raise ModelError(f"there is no file or folder {place}; give a file of adapters, or the folder of one")
    for folder in (place, place / "export"):
        for name in (ADAPTERS, f"{_OF_PEFT}.safetensors", f"{_OF_PEFT}.bin"):
            if (folder / name).is_file():
                return folder / name
    others = sorted(place.glob("*.safetensors"))
    if len(others) != 1:
        found = f"it has {', '.join(path.name for path in others[:4])}" if others else "it has no .safetensors"
        raise ModelError(f"{place} holds no file of adapters that is known by its name ({found}); give the file itself")
    return others[0]


def read_adapters(file: Path) -> StoredAdapters:
    """The tensors of a file of adapters, in host memory, and its settings.

    Raises ModelError if it cannot be read.
    """
    try:
        with opened(file) as tensors:
            found = {name: tensors.get(name) for name in tensors.names()}
            header = tensors.metadata().get(_HEADER)
    except ModelError as error:
        why = error.__cause__ or "it is damaged"
        raise ModelError(f"{file} cannot be read as adapters ({why}); get them again, as .safetensors") from error
    try:
        settings = json.loads(header) if header else {}
        if file.stem == _OF_PEFT and file.with_name(_CONFIG).is_file():
            settings = read_json(file.with_name(_CONFIG))
    except (OSError, ValueError) as error:
        raise ModelError(f"the settings of {file} cannot be read: {error}; get the adapters again") from error
    if not isinstance(settings, dict):
        raise ModelError(f"the settings of {file} must be a JSON object; get the adapters again")
    return StoredAdapters(file=file, tensors=found, settings=settings)

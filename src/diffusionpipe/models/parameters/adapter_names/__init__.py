"""Adapters in files in which the layers have other programs' names, not diffusers'.

`to_foreign` makes the tensors of a file that ComfyUI reads. `from_foreign` takes adapters from a file in any usual
names. `check_readable` says before training which layers have no name there.
"""

from diffusionpipe.models.parameters.adapter_names.families import FORMS, AdapterNaming, text_layer
from diffusionpipe.models.parameters.adapter_names.foreign import (
    Adapters,
    Weights,
    check_readable,
    from_foreign,
    to_foreign,
)
from diffusionpipe.models.parameters.adapter_names.matrices import Adapter, joined, scaled, separated
from diffusionpipe.models.parameters.adapter_names.originals import (
    OriginalLayer,
    OriginalRows,
    layer_sizes,
    original_layers,
)

__all__ = [
    "FORMS",
    "Adapter",
    "AdapterNaming",
    "Adapters",
    "OriginalLayer",
    "OriginalRows",
    "Weights",
    "check_readable",
    "from_foreign",
    "joined",
    "layer_sizes",
    "original_layers",
    "scaled",
    "separated",
    "text_layer",
    "to_foreign",
]

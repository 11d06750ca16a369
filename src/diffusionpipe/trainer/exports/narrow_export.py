"""A diffusers folder whose denoiser is stored in few bits: `export --quantize` writes it, `sample` draws from it.

Beside the denoiser's files everything is as in the folder that it was made from. Each linear layer and convolution has,
in place of its weight, `codes` and `scales`, and `input_scale` where inputs are rounded too. Its configuration names
the method `diffusionpipe`, so that diffusers refuses the component instead of drawing from random weights.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import reason_of
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.opening.folder import family_of, refuse_narrow_export
from diffusionpipe.models.parameters.exported_layers import METHOD, Width, encoded, exportable, input_scale
from diffusionpipe.models.parameters.stored import StoredWeights, missing_weights, stored_weights
from diffusionpipe.models.parameters.weights import tensors_in_turn

_FILE = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """The sizes of a narrow export: how many of its numbers are stored in few bits, and the bytes before and after."""

    component: str
    """The name of the component that is stored in few bits."""
    numbers: int
    """The count of numbers in the component's tensors."""
    narrow: int
    """The count of these numbers that are stored in few bits."""
    wide_bytes: int
    """The bytes of the component's tensors before."""
    narrow_bytes: int
    """The bytes of the component's tensors in the export."""


def write_narrow_export(
    folder: Path,
    out: Path,
    graph: LayerGraph,
    width: Width,
    ranges: Mapping[str, float],
    *,
    variant: str | None = None,
    on_tensor: Callable[[int, int], None] = lambda _done, _all: None,
) -> Narrowed:
    """Writes a copy of a diffusers folder as `out` with the denoiser stored at `width`, and returns its sizes.

    `graph`: the folder's model. `ranges`: the largest magnitude among the inputs of each layer, by its name, where
    `width` rounds inputs. `on_tensor` is called with (tensors done, all). One wide tensor at a time is in memory. The
    folder appears only when it is complete.

    Raises:
        ModelError: the folder is a narrow export itself, `out` exists, or something cannot be read or written.
    """
    family = family_of(folder)
    refuse_narrow_export(folder, family)
    name = family.trainable[0]
    source = stored_weights(folder / name, variant)
    if source is None:
        raise ModelError(missing_weights(folder / name, "and there is nothing to export narrow; get the model again"))
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        own = {path.name for path in (*source.files, *([source.index] if source.index is not None else []))}
        # Without the wide weights.
        shutil.copytree(folder, temporary, ignore=lambda at, _names: own if Path(at) == folder / name else set())
        tensors, sizes = _narrow(graph, name, source, width, ranges, on_tensor)
        save_file(tensors, temporary / name / _FILE, metadata={"format": "pt"})
        mode = (temporary / name / "config.json").stat().st_mode
        (temporary / name / _FILE).chmod(mode)  # safetensors writes files that their owner alone can read
        config: Any = read_json(folder / name / "config.json")
        config["quantization_config"] = {"quant_method": METHOD, "width": width.value}
        (temporary / name / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(_card(name, width, sizes), encoding="utf-8")
        temporary.rename(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {reason_of(error)}; choose another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sizes


def _narrow(
    graph: LayerGraph,
    name: str,
    source: StoredWeights,
    width: Width,
    ranges: Mapping[str, float],
    on_tensor: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], Narrowed]:
    """The tensors of the export's file by name, and the sizes of the export.

    `name`: the component that is stored in few bits.
    """
    component, layers = graph.components[name], exportable(graph, name)
    names = [key for key, _ in component.named_parameters()] + [key for key, _ in component.named_buffers()]
    found: dict[str, Tensor] = {}
    numbers = narrow = wide_bytes = 0
    for done, (key, tensor) in enumerate(tensors_in_turn(name, component, source, names), start=1):
        numbers, wide_bytes = numbers + tensor.numel(), wide_bytes + tensor.nbytes
        path, _, last = key.rpartition(".")
        if path not in layers or last != "weight":
            found[key] = tensor
        else:
            narrow += tensor.numel()
            found |= {f"{path}.{part}": value for part, value in encoded(tensor, width).items()}
            if width.rounds_inputs:
                found[f"{path}.input_scale"] = input_scale(ranges[path])
        on_tensor(done, len(names))
    return found, Narrowed(
        component=name,
        numbers=numbers,
        narrow=narrow,
        wide_bytes=wide_bytes,
        narrow_bytes=sum(tensor.nbytes for tensor in found.values()),
    )


def _card(name: str, width: Width, sizes: Narrowed) -> str:
    means = {
        Width.W8: "weights in 8 bits",
        Width.W8A8: "weights and inputs of layers in 8 bits",
        Width.W4: "weights in 4 bits (nf4)",
    }
    return f"""# A narrow export ({width})

The component `{name}` has {means[width]}: {sizes.narrow / sizes.numbers:.0%} of its numbers, and
{sizes.narrow_bytes / sizes.wide_bytes:.0%} of the bytes of the model that it was made from.

Draw from it with `diffusionpipe sample`. diffusers cannot open this component; it opens the wide model.
"""

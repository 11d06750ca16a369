"""Writes a diffusers folder as one file, under the names that the model's authors gave its tensors.

Each tensor goes to the rows from which diffusers' converter would take it, so that `from_single_file` of diffusers
gives it back bit for bit.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.output_file import draft_of, reason_of
from diffusionpipe.models.opening.folder import (
    component_config,
    family_of,
    model_index,
    refuse_narrow_export,
    scheduler_config,
)
from diffusionpipe.models.parameters.single_file.layout import (
    PIPELINES,
    Component,
    check_whole,
    layout_of,
    parts_of,
    plain_names,
)
from diffusionpipe.models.parameters.single_file.origins import RowOrigin
from diffusionpipe.models.parameters.stored import StoredWeights, missing_weights, opened, stored_weights

_TIED = {"encoder.embed_tokens.weight": "shared.weight"}
"""Tensors of T5 that a folder may hold once and a file holds twice, because readers look for both names."""


def write_single_file(folder: Path, out: Path, variant: str | None = None) -> tuple[str, ...]:
    """Writes the model of a diffusers folder into the file `out`; returns the names of the components in it.

    All weights are in memory at once. The file appears only when it is complete.

    Raises:
        ModelError: the pipeline has no such files, a component would not be read back as it is, or the file cannot be
            written.
    """
    pipeline = str(model_index(folder).get("_class_name"))
    if pipeline not in PIPELINES:
        raise ModelError(
            f"{folder} is a {pipeline}, which is not written into one file; these are: {', '.join(PIPELINES)}"
        )
    family, tensors = family_of(folder), dict[str, Tensor]()
    refuse_narrow_export(folder, family)
    components, known = dict[str, Component](), dict[str, Mapping[str, RowOrigin]]()
    for name in parts_of(pipeline):
        source = stored_weights(folder / name, variant)
        if source is None:
            raise ModelError(missing_weights(folder / name, "and they are needed for a whole model in one file"))
        stored, kind = _tensors_in(source), family.components[name]
        if kind == "T5EncoderModel":
            stored |= {new: stored[own] for new, own in _TIED.items() if new not in stored and own in stored}
        components[name] = Component(
            kind=kind,
            config=component_config(folder, name),
            shapes={key: tuple(tensor.shape) for key, tensor in stored.items()},
        )
        shapes, known[name] = layout_of(pipeline, name, components[name])
        tensors |= _filled(name, shapes, known[name], plain_names(stored))
    tensors |= _marks(folder, pipeline)
    check_whole(components, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, known)
    _save(tensors, out, {"format": "pt"})
    return parts_of(pipeline)


def _marks(folder: Path, pipeline: str) -> dict[str, Tensor]:
    """Empty tensors whose names tell ComfyUI that an SDXL predicts velocities, and that its last level is all noise."""
    config = scheduler_config(folder)
    if pipeline != "StableDiffusionXLPipeline" or config.get("prediction_type") != "v_prediction":
        return {}
    names = ("v_pred", "ztsnr") if config.get("rescale_betas_zero_snr") else ("v_pred",)
    return {name: torch.empty(0) for name in names}


def _tensors_in(source: StoredWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in source.files:
        with opened(file) as tensors:
            found |= {key: tensors.get(key) for key in tensors.names()}
    return found


def _filled(
    name: str, shapes: Mapping[str, tuple[int, ...]], origins: Mapping[str, RowOrigin], stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of one component in the authors' form, by name.

    `shapes`: their shapes by name. `origins`: by the names of diffusers' tensors, the rows of the authors' tensors that
    make each. `stored`: diffusers' tensors by name.

    Raises:
        ModelError: a tensor that the file has no place for is not the one that readers take for it.
    """
    # A tensor of the file has the type of a tensor that goes into it.
    dtype_of = {origin.name: stored[key].dtype for key, origin in origins.items()}
    whole = {key: torch.empty(shape, dtype=dtype_of[key]) for key, shape in shapes.items()}
    rows = dict.fromkeys(shapes, 0)
    for key, origin in origins.items():
        tensor = stored[key]
        if not origin.name:
            if not torch.equal(tensor.float(), torch.eye(*tensor.shape)):
                raise ModelError(
                    f"{name} has a {key} that is not an identity, and a file has no place for it; use the folder"
                )
            continue
        origin.write(tensor, whole[origin.name])
        rows[origin.name] += sum(end - first for first, end in origin.ranges)
    assert all(rows[key] == (shape[0] if shape else 1) for key, shape in shapes.items()), "each row is written once"
    return whole


def _save(tensors: Mapping[str, Tensor], out: Path, metadata: Mapping[str, str]) -> None:
    """Writes the tensors into the file `out`, which appears only when it is complete.

    Raises:
        ModelError: the file cannot be written.
    """
    temporary = draft_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors writes files that their owner alone can read
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        temporary.chmod(mode)
        temporary.replace(out)
    except OSError as error:
        raise ModelError(f"cannot write {out}: {reason_of(error)}; choose a place that can be written") from error
    finally:
        temporary.unlink(missing_ok=True)

"""The names and shapes of the tensors in a pipeline's single file, made from the components' tensors in diffusers.

    StableDiffusionPipeline      model.diffusion_model., first_stage_model., cond_stage_model.
    StableDiffusionXLPipeline    model.diffusion_model., first_stage_model., conditioner.embedders.
    StableDiffusion3Pipeline     model.diffusion_model., first_stage_model., text_encoders.
    FluxPipeline                 the transformer alone, without a prefix

A layout is a proposal: `origins` says what diffusers makes of it, and it holds if that is each tensor of the component.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names.originals import original_tensors
from diffusionpipe.models.parameters.single_file.origins import RowOrigin, Shape, Shapes, origins_of

T = TypeVar("T")
_DENOISER, _VAE = "model.diffusion_model.", "first_stage_model."
_PROJECTION = "text_projection.weight"
_NOT_NEEDED = ("position_ids",)


@dataclass(frozen=True, slots=True)
class _Place:
    """The names of a component's tensors in the file: their prefix, and whose names follow it."""

    prefix: str
    """The start of the names."""
    is_open_clip: bool = False
    """Whether OpenCLIP's names follow; else the names of transformers or of the authors."""


_PLACES: Mapping[str, Mapping[str, _Place]] = {
    "StableDiffusionPipeline": {
        "unet": _Place(_DENOISER),
        "vae": _Place(_VAE),
        "text_encoder": _Place("cond_stage_model.transformer."),
    },
    "StableDiffusionXLPipeline": {
        "unet": _Place(_DENOISER),
        "vae": _Place(_VAE),
        "text_encoder": _Place("conditioner.embedders.0.transformer."),
        "text_encoder_2": _Place("conditioner.embedders.1.model.", is_open_clip=True),
    },
    "StableDiffusion3Pipeline": {
        "transformer": _Place(_DENOISER),
        "vae": _Place(_VAE),
        "text_encoder": _Place("text_encoders.clip_l.transformer."),
        "text_encoder_2": _Place("text_encoders.clip_g.transformer."),
        "text_encoder_3": _Place("text_encoders.t5xxl.transformer."),
    },
    "FluxPipeline": {"transformer": _Place("")},
}
PIPELINES = tuple(_PLACES)
"""The classes of pipelines that have single files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A component of a diffusers folder: its class, its configuration, and the shapes of its tensors."""

    kind: str
    """The name of its class."""
    config: Mapping[str, Any]
    """Its configuration."""
    shapes: Shapes
    """Name in diffusers -> shape of its tensor."""


def parts_of(pipeline: str) -> tuple[str, ...]:
    """The names of the components that the authors' single files of a pipeline hold."""
    return tuple(_PLACES[pipeline])


def layout_of(pipeline: str, name: str, component: Component) -> tuple[dict[str, Shape], dict[str, RowOrigin]]:
    """(name in the single file -> shape, name in diffusers -> origin in the file), for a component's tensors.

    `pipeline`: the pipeline's class. `name`: the component's name.

    Raises:
        ModelError: diffusers' converter does not make the component again from such a file.
    """
    place = _PLACES[pipeline][name]
    # Of both versions only the second has OpenCLIP's encoder, with this activation.
    if component.config.get("hidden_act") == "gelu" and pipeline == "StableDiffusionPipeline":  # Stable Diffusion 2
        place = replace(place, prefix="cond_stage_model.model.", is_open_clip=True)
    plain = {key: shape for key, shape in plain_names(component.shapes).items() if not key.endswith(_NOT_NEEDED)}
    if component.kind.startswith("CLIPText"):
        proposed = (
            # The first encoder of Stable Diffusion 3 has a projection that its files leave out.
            _open_clip(plain) if place.is_open_clip else _clip(plain, has_projection=".clip_l." not in place.prefix)
        )
    elif component.kind == "T5EncoderModel":
        proposed = dict(plain)
    else:
        proposed = _denoiser_or_vae(component, plain)
    shapes = {place.prefix + key: shape for key, shape in proposed.items()}
    try:
        found = origins_of(component.kind, component.config, shapes)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        raise _refused(name, f"its converter stops at {type(error).__name__}: {error}") from error
    origins = plain_names(found or {})
    wrong = [key for key, shape in plain.items() if key not in origins or origins[key].shape != shape]
    wrong += [key for key in origins if key not in plain]
    if wrong:
        raise _refused(name, f"{wrong[0]} would be lost" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    return shapes, origins


def check_whole(
    components: Mapping[str, Component], shapes: Shapes, known: Mapping[str, Mapping[str, RowOrigin]]
) -> None:
    """Check that a reader of a whole file finds each component under its own names, and no other one in its place.

    `components`: name -> component. `shapes`: of all tensors of the file. `known`: name of a component -> the origins
    of its tensors, as `layout_of` returns them.

    Raises:
        ModelError: another component would be read in its place.
    """
    for name, component in components.items():
        if plain_names(origins_of(component.kind, component.config, shapes) or {}) != known[name]:
            raise _refused(name, "it would read another component, since it tells them apart by their widths")


def plain_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The values by names without "text_model." at the start, which only some versions of transformers have."""
    return {key.removeprefix("text_model."): tensor for key, tensor in tensors.items()}


def _refused(name: str, why: str) -> ModelError:
    return ModelError(
        f"{name} cannot be written into one file, because diffusers would not read it back ({why}); use the folder"
    )


def _denoiser_or_vae(component: Component, shapes: Shapes) -> dict[str, Shape]:
    """Name in the authors' file -> shape, of a denoiser's or VAE's tensors.

    Fused rows are one tensor there, and a VAE's attention has convolutions of 1 x 1.
    """
    modules = dict.fromkeys(key.rpartition(".")[0] for key in shapes)
    found = {}
    for original, parts in original_tensors(component.kind, modules, component.config).items():
        own = [shapes[part] for part in parts if part in shapes]
        if not own:
            continue
        # Joined tensors lie one after the other along dimension 0.
        shape = (sum(one[0] for one in own), *own[0][1:])
        is_flat = component.kind == "AutoencoderKL" and ".attn_1." in original and len(shape) == 2
        found[original] = (*shape, 1, 1) if is_flat else shape
    return found


def _clip(shapes: Shapes, *, has_projection: bool) -> dict[str, Shape]:
    found = {f"text_model.{key}": shape for key, shape in shapes.items() if key != _PROJECTION}
    return found | ({_PROJECTION: shapes[_PROJECTION]} if has_projection and _PROJECTION in shapes else {})


def _open_clip(shapes: Shapes) -> dict[str, Shape]:
    """OpenCLIP's name -> shape, of a text encoder's tensors, by the inverse of diffusers' table of names.

    q, k and v are one tensor there, and the projection is transposed.
    """
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

    table = DIFFUSERS_TO_LDM_MAPPING["openclip"]
    of_layers = [(new, old) for new, old in table["transformer"].items() if not new.startswith("transformer.")]
    found: dict[str, Shape] = {}
    for key, shape in shapes.items():
        name = key if key == _PROJECTION else f"text_model.{key}"
        if name in table["layers"]:
            found[table["layers"][name]] = shape[::-1] if key == _PROJECTION else shape
            continue
        for new, old in of_layers:
            name = name.replace(new, old)
        name, is_fused = re.subn(r"\.[qkv]_proj\.(weight|bias)$", r".in_proj_\1", name)
        rows = 3 * shape[0] if is_fused else shape[0]
        found[f"transformer.{name}"] = (rows, *shape[1:])
    return found

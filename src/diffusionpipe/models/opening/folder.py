"""A diffusers folder or hub id as a layer graph on the meta device."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.ir.home import expanded_path
from diffusionpipe.models.base.coordinates import has_coordinates, with_coordinates, without_coordinates
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Clip, Family, LowResolution
from diffusionpipe.models.base.self_conditioning import plain_config, self_conditioned
from diffusionpipe.models.families import (
    aura_flow,
    chroma,
    class_unet,
    controlnet,
    deepfloyd,
    dit,
    flux,
    flux2,
    flux2_klein,
    hunyuan_video,
    krea2,
    ltx,
    pixart_sigma,
    qwen_image,
    sana,
    sd3,
    sdxl,
    stable_diffusion,
    wan,
    z_image,
)
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
from diffusionpipe.models.opening.hub import fetched
from diffusionpipe.models.opening.meta import check_nulls, module_on_meta
from diffusionpipe.models.opening.single_file import linked_folder, parts_in
from diffusionpipe.models.parameters.exported_layers import width_of
from diffusionpipe.models.parameters.lora import DENOISERS, LoraSettings, adapt, is_adapter
from diffusionpipe.models.parameters.lora_targets import is_text_encoder
from diffusionpipe.models.parameters.stored import StoredWeights, missing_weights, stored_weights
from diffusionpipe.models.parameters.weights import fill, misfits_of
from diffusionpipe.models.parts.masks import reads_mask
from diffusionpipe.plugins import Kind, load

REGISTRY: Mapping[str, Family] = {
    "StableDiffusionPipeline": stable_diffusion.FAMILY,
    "StableDiffusionXLPipeline": sdxl.FAMILY,
    "StableDiffusionInpaintPipeline": stable_diffusion.INPAINT,
    "StableDiffusionXLInpaintPipeline": sdxl.INPAINT,
    "StableDiffusionControlNetPipeline": controlnet.FAMILY,
    "StableDiffusion3Pipeline": sd3.FAMILY,
    "FluxPipeline": flux.FAMILY,
    "FluxFillPipeline": flux.FILL,
    "Flux2Pipeline": flux2.FAMILY,
    "Flux2KleinPipeline": flux2_klein.FAMILY,
    "DiTPipeline": dit.FAMILY,
    "DDPMPipeline": class_unet.BASE,
    "QwenImagePipeline": qwen_image.FAMILY,
    "WanPipeline": wan.FAMILY,
    "WanImageToVideoPipeline": wan.FAMILY,
    "LTXPipeline": ltx.FAMILY,
    "HunyuanVideoPipeline": hunyuan_video.FAMILY,
    "ZImagePipeline": z_image.FAMILY,
    "ChromaPipeline": chroma.FAMILY,
    "PixArtSigmaPipeline": pixart_sigma.FAMILY,
    "SanaPipeline": sana.FAMILY,
    "Krea2Pipeline": krea2.FAMILY,
    "AuraFlowPipeline": aura_flow.FAMILY,
    "IFPipeline": deepfloyd.BASE,
    "IFSuperResolutionPipeline": deepfloyd.SUPER_RESOLUTION,
}
"""Pipeline class in model_index.json -> its family."""
_SAID = 2
"""The most problems of components that an error states."""


def build_graph(
    folder_or_id: str | Path,
    *,
    objective: ObjectiveSettings,
    resolution: int,
    train: Collection[str] | None = None,
    dtype: str = "float32",
    lora: LoraSettings | None = None,
    low: LowResolution | None = None,
    clip: Clip | None = None,
    captions: CaptionReading = WHOLE,
    is_drawn: bool = False,
    others: Sequence[Clip] = (),
    is_placed: bool = False,
    multiple: int | None = None,
) -> LayerGraph:
    """The layer graph of the model in a diffusers folder or of a hub id, with parameters on the meta device.

    `train` are the components to train; None for the denoiser alone. With `lora` only its adapters are trained. `low`:
    the small pictures that a model of super-resolution reads; others read none. `clip`: the size of clips, in place of
    square pictures. `captions`: how captions are read, if not as in diffusers' pipeline. `is_drawn`: the model only
    draws, so that it may be a narrow export. `others`: further sizes of samples, for which the graph has `others`.
    `is_placed`: the denoiser also reads coordinates, as one that is trained on patches. `multiple`: the number of which
    sides are multiples, where sizes are chosen for an area.

    Raises ModelError if there is no such model, or for all that its family refuses.
    """
    folder = resolve_folder(folder_or_id)
    family = family_of(folder)
    if not is_drawn:
        refuse_narrow_export(folder, family)
    if is_placed:
        _check_places(family)
    components = open_components(folder, is_plain=objective.self_conditioning > 0 or is_placed)
    noise = Objective(objective, scheduler_config(folder))
    if dtype == "float64":  # before layers are cut, which keep the types that they are cut with
        components = {name: component.double() for name, component in components.items()}
    if family.augmentation is not None:
        levels = scheduler_config(folder, family.augmentation)
        components[family.augmentation] = deepfloyd.noise_levels(levels)
    try:
        graph = family_graph(
            family,
            components,
            noise,
            resolution=resolution,
            train=train,
            dtype=dtype,
            lora=lora,
            low=low,
            clip=clip,
            captions=captions,
            others=others,
            is_placed=is_placed,
            multiple=multiple,
        )
        if is_placed:
            assert family.places is not None
            graph = with_coordinates(graph, family.trainable[0], family.places)
        return graph
    except ModelError as error:
        if str(folder) in str(error):
            raise
        raise ModelError(f"{folder}: {error}") from error
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, ZeroDivisionError, OverflowError) as error:
        raise ModelError(
            f"{folder}: the configurations of its components do not fit together: {type(error).__name__}: {error}"
        ) from error


def family_graph(
    family: Family,
    components: Mapping[str, nn.Module],
    objective: Objective,
    *,
    resolution: int,
    train: Collection[str] | None,
    dtype: str,
    lora: LoraSettings | None,
    low: LowResolution | None = None,
    clip: Clip | None = None,
    captions: CaptionReading = WHOLE,
    others: Sequence[Clip] = (),
    is_placed: bool = False,
    multiple: int | None = None,
) -> LayerGraph:
    """The layer graph of a family's components, with adapters if `lora` is given; arguments as in `build_graph`.

    `is_placed`: `others` are patches, so that errors name them; `build_graph` adds the coordinates. `multiple` is named
    in errors alone.

    Raises ModelError for all that the family refuses.
    """
    chosen = tuple(train) if train is not None else family.trainable[:1]
    if lora is not None:
        _check_adapted(family, chosen)
    if objective.settings.self_conditioning and lora is not None:
        raise ModelError(f"lora: {refusal(Feature.LORA, Feature.SELF_CONDITIONING)}")
    if objective.settings.self_conditioning and "controlnet" in family.trainable:
        raise ModelError(f"objective: {refusal(Feature.SELF_CONDITIONING, Feature.CONTROLNET)}")
    if objective.settings.has_learned_range and not family.has_variances:
        raise ModelError('objective.variance: this model states no variances that are trained; set it to "fixed"')
    if objective.is_flow and family.has_variances:
        raise ModelError(
            "objective.kind: diffusers' pipeline of this model draws no flows; use epsilon or v_prediction"
        )
    if (low is None) is not (family.augmentation is None):
        has = "reads" if family.augmentation is not None else "does not read"
        raise ModelError(f"low_resolution: the model {has} small pictures; {'remove it' if low else 'set their size'}")
    if others:
        return _of_sizes(
            partial(
                family_graph,
                family,
                components,
                objective,
                resolution=resolution,
                # As below: encoders with adapters are no trained components for their family.
                train=chosen if lora is None else family.trainable[:1],
                dtype=dtype,
                low=low,
                captions=captions,
            ),
            family,
            (clip or Clip.square(resolution), *others),
            None if lora is None else (chosen, lora),
            is_placed=is_placed,
            multiple=multiple,
        )
    if clip is not None and (problem := _misfit(family, clip)):
        raise ModelError(problem)
    more: dict[str, object] = {} if low is None else {"low": low}
    if clip is not None:
        more["clip"] = clip
    if captions != WHOLE:
        _check_captions(family, captions)
        more["captions"] = captions
    # Encoders with adapters are no trained components for their family: they stay in evaluation mode, without dropout.
    whole = chosen if lora is None else family.trainable[:1]
    graph = family.graph(components, objective=objective, resolution=resolution, train=whole, dtype=dtype, **more)
    if objective.settings.self_conditioning and reads_mask(graph):
        raise ModelError(f"objective: {refusal(Feature.SELF_CONDITIONING, Feature.MASKS)}")
    if objective.settings.self_conditioning:
        graph = self_conditioned(graph, family.trainable[0], family.convolution)
    objective.shift.factor(graph.num_tokens)  # refused here if it needs tokens and there are none
    if lora is not None:
        adapt(graph, chosen, lora)
    return graph


def _of_sizes(
    build: Callable[..., LayerGraph],
    family: Family,
    sizes: Sequence[Clip],
    adapters: tuple[tuple[str, ...], LoraSettings] | None,
    *,
    is_placed: bool,
    multiple: int | None,
) -> LayerGraph:
    """The graph for the first size, whose `others` are graphs for the other sizes, over the same modules.

    `build` makes a graph of one size without adapters. `adapters`: (components to adapt, settings); None: none. Layers
    are cut before adapters are added, so each size has layers of its own.

    Raises ModelError for a size that the model cannot take. The message names the nearest size; with `multiple`, of
    which sides are multiples, other such numbers; with `is_placed`, where sizes are the whole picture and its patches,
    the nearest whole pictures. It is the model's own message if other sizes have the same fault.
    """
    for size in sizes:
        if problem := _misfit(family, size):
            raise ModelError(f"data.resolution: {size}: {problem}")

    def built(size: Clip) -> LayerGraph:
        # Families of square pictures take a resolution and no `clip`.
        if size.width == size.height and size.frames == 1:
            return build(resolution=size.width, lora=None)
        return build(clip=size, lora=None)

    @cache
    # Kept, because each trial traces the model.
    def fault(size: Clip) -> str | None:
        try:
            built(size)
        except ModelError as error:
            return str(error)
        return None

    def taken(size: Clip) -> bool:
        return fault(size) is None

    graphs = []
    for size in sizes:
        try:
            graphs.append(built(size))
        except ModelError as error:
            if str(error) == fault(replace(size, width=2 * size.width, height=2 * size.height)):
                raise  # it is not the size's
            if is_placed:
                raise ModelError(_unfit_patch(sizes, size, error, taken)) from error
            if multiple is not None and (ways := _other_multiples(multiple, size, taken)):
                subject = f"data.multiple: {multiple} gives sizes such as {size}"
                raise ModelError(f"{subject}: {_without_remedy(error)}; set it to {ways}") from error
            near = _near(size, taken)
            reason = error if near is None else f"{_without_remedy(error)}; the nearest size that it takes is {near}"
            raise ModelError(f"data.resolution: {size}: {reason}") from error
    names = {
        tuple((layer.name, layer.reads, layer.writes, layer.modules) for layer in graph.layers) for graph in graphs
    }
    assert len(names) == 1, "the layers of every size have the same names"
    graphs = [replace(graph, size=size) for graph, size in zip(graphs, sizes, strict=True)]
    if adapters is not None:
        adapt(graphs[0], *adapters)
    return replace(graphs[0], others=tuple(graphs[1:]))


def _misfit(family: Family, size: Clip) -> str | None:
    """A sentence that says why a family takes no clips, or only square pictures, if `size` is another; else None."""
    if size.frames > 1 and not family.has_clips:
        able = ", ".join(name for name, one in REGISTRY.items() if one.has_clips)
        where = f"x{size.frames} in data.resolution, or data.frames"
        return f"this model reads pictures and no clips; models of clips are {able}; leave out the frames ({where})"
    if size.width != size.height and not (family.has_aspects or family.has_clips):
        able = ", ".join(name for name, one in REGISTRY.items() if one.has_aspects)
        return (
            f"this model reads square pictures alone; models of other aspects are {able}; give sides alone in "
            "data.resolution, and leave out data.aspects and data.height"
        )
    return None


def _other_multiples(multiple: int, size: Clip, is_taken: Callable[[Clip], bool]) -> str:
    """The multiples of the model's step next to `multiple`, as "64 or 128"; "" if it is one itself, or none is found.

    `is_taken(size)`: whether the model takes samples of that size; `size`: one that it does not take.
    """
    for step in (2, 4, 8, 16, 32, 64, 128):
        # Odd multiples, so that no larger step would do.
        width, height = ((side // (2 * step) * 2 + 1) * step for side in (size.width, size.height))
        if is_taken(replace(size, width=width, height=height)):
            below = multiple // step * step
            return "" if below == multiple else " or ".join(str(one) for one in (below, below + step) if one)
    return ""


def _without_remedy(error: ModelError) -> str:
    """The text of an error about a size, without the size that it proposes, which may have another aspect."""
    return str(error).partition("; use e.g.")[0]


def _near(size: Clip, is_taken: Callable[[Clip], bool]) -> Clip | None:
    """The nearest size with sides that are multiples of 8, 16, ... or 128 that a model takes; None if it takes none.

    `is_taken(size)`: whether it takes that size.
    """
    for multiple in (8, 16, 32, 64, 128):
        width, height = (max(1, round(side / multiple)) * multiple for side in (size.width, size.height))
        near = replace(size, width=width, height=height)
        if near != size and is_taken(near):
            return near
    return None


def _unfit_patch(sizes: Sequence[Clip], size: Clip, error: ModelError, is_taken: Callable[[Clip], bool]) -> str:
    """The message about a size that the model does not take, a whole picture or a patch, with resolutions that fit.

    `sizes`: the whole picture, then its patches. `error`: the model's own. `is_taken(size)`: whether it takes a size.
    """
    whole = sizes[0].width
    part = whole // size.width
    subject = f"{size}" if part == 1 else f"patches of {whole} / {part} are {size}"
    reason = _without_remedy(error)  # which is for the patch, not for the key
    for multiple in (8, 16, 32, 64, 128, 256):
        below = whole // multiple * multiple
        able = [
            side
            for side in (below, below + multiple)
            if 0 < side != whole and all(is_taken(Clip.square(side // (whole // one.width))) for one in reversed(sizes))
        ]
        if able:
            return f"data.resolution: {subject}: {reason}; set it to {' or '.join(map(str, able))}"
    return f"data.resolution: {subject}: {reason}; choose another resolution"


def _check_places(family: Family) -> None:
    """Check that the family's denoiser can be trained on patches. Raises ModelError if it cannot."""
    if family.places is None:
        able = ", ".join(name for name, one in REGISTRY.items() if one.places is not None)
        raise ModelError(
            "data.patches: the denoiser has absolute positions, reads masks, or has no first convolution for "
            f"coordinates; models of patches are {able}: remove patches"
        )


def _check_captions(family: Family, captions: CaptionReading) -> None:
    """Check that the family can read captions in this way. Raises ModelError if it cannot."""
    if captions.chunks > 1 and not family.has_chunks:
        able = ", ".join(name for name, one in REGISTRY.items() if one.has_chunks)
        raise ModelError(f"caption_chunks: captions are read in chunks by {able} alone; leave it out")
    if captions.clip_skip is not None and not family.has_clip_skip:
        able = ", ".join(name for name, one in REGISTRY.items() if one.has_clip_skip)
        raise ModelError(
            f"clip_skip has no effect: the layer that is read of this model's text encoder is fixed. It is for {able}; "
            "remove it"
        )


def _check_adapted(family: Family, chosen: Collection[str]) -> None:
    """Check that the chosen components of a family can have adapters. Raises ModelError if one cannot."""
    own = family.trainable[0]
    if not family.has_adapters:
        raise ModelError(f"lora: diffusers' pipeline of this model loads no adapters; train the whole {own}")
    if own not in DENOISERS:
        raise ModelError(f"lora: {refusal(Feature.LORA, Feature.DIT, trained=own, kind=family.components[own])}")
    able = (own, *(name for name, kind in family.components.items() if is_text_encoder(kind)))
    if others := [name for name in chosen if name not in able]:
        raise ModelError(
            f"lora: {', '.join(others)} can have no adapters; in model.train choose from {', '.join(able)}, or remove "
            "[lora] to train whole components"
        )
    if not chosen:
        raise ModelError(f"lora: nothing is trained; choose from {', '.join(able)}")


def resolve_folder(folder_or_id: str | Path, variant: str | None = None, config: str | None = None) -> Path:
    """The path of a model's folder: the given one, or, if it does not exist, a local copy of the hub's repository.

    A model in one safetensors file becomes a folder of links (see `single_file`); all that the file lacks is in the
    folder or hub id `config`.

    Of a repository only the components' configurations and safetensors are fetched, or .bin files of components without
    safetensors. Of the variants of weights only `variant` is fetched.

    Raises ModelError if there is neither, if a folder has no weights of the variant, or `config` is given for a folder.
    """
    path = _own(folder_or_id)
    if path.is_file():
        return _of_file(path, variant, config)
    if path.suffix.lower() == SINGLE and not path.exists():
        raise ModelError(f"there is no file {folder_or_id}; correct the path")
    if config is not None:
        raise ModelError(
            f"model.config: it belongs to a model in one file, and {folder_or_id} is "
            f"{'a folder' if path.is_dir() else 'no file here'}; remove it"
        )
    if path.is_dir():
        # The names have the variant before an ending or before the number of a shard.
        if variant is not None and not any(path.glob(f"*/*.{variant}[.-]*")):
            raise ModelError(
                f'model.variant: no weights in {path} have the variant "{variant}"; remove it, or give a folder that '
                "has them"
            )
        return path
    if not is_hub_id(folder_or_id):
        raise ModelError(f"there is no model folder {folder_or_id}; give a diffusers folder or a hub id owner/name")
    return _fetched(str(folder_or_id), _parts(), variant)


def _parts() -> set[str]:
    """The names of all folders of a repository that some family reads."""
    folders = {name for family in REGISTRY.values() for name in family.components}
    folders |= {family.augmentation for family in REGISTRY.values() if family.augmentation is not None}
    return folders | {"scheduler", "tokenizer", "tokenizer_2", "tokenizer_3"}


def _fetched(name_of_model: str, folders: Collection[str], variant: str | None) -> Path:
    """The path of a local copy of these folders of a repository, with .bin files of folders without safetensors.

    Raises ModelError if they cannot be fetched.
    """
    patterns = [f"{name}/*{end}" for name in folders for end in (".json", ".txt", ".safetensors")]
    found = fetched(name_of_model, ("model_index.json", *patterns), variant)
    # Components with a configuration and no safetensors.
    bare = [name for name in sorted(folders) if (found / name / "config.json").is_file()]
    bare = [name for name in bare if not any((found / name).glob("*.safetensors*"))]
    if bare:  # old repositories have nothing else, and others everything twice
        ends = ("*.bin", "*.bin.index.json")
        found = fetched(name_of_model, [f"{name}/{end}" for name in bare for end in ends], variant)
    return found


SINGLE = ".safetensors"
"""The ending of the name of a model in one file; capitals count too."""


def _of_file(file: Path, variant: str | None, config: str | None) -> Path:
    """The path of the folder of links for a model in one file.

    `config`: the folder or hub id with all that the file lacks; of a hub id no weights are fetched that the file has.

    Raises ModelError if `config` is missing, or one of the two cannot be read.
    """
    if file.suffix.lower() != SINGLE:
        raise ModelError(f"{file} is a file; give a diffusers folder, a hub id owner/name or a .safetensors file")
    if config is None:
        raise ModelError(
            f"{file} is a model in one file; set model.config to the diffusers folder or hub id that has its "
            'configurations, tokenizers and scheduler, e.g. "stable-diffusion-v1-5/stable-diffusion-v1-5"'
        )
    is_here = _own(config).is_dir()
    if not is_here and not is_hub_id(config):
        raise ModelError(f"model.config: there is no folder {config}; give a diffusers folder or a hub id owner/name")
    folder = _own(config)
    if not is_here:
        ends = [f"{name}/*{end}" for name in _parts() for end in (".json", ".txt")]
        folder = fetched(config, ("model_index.json", *ends), variant)
    family, pipeline = family_of(folder), str(model_index(folder).get("_class_name"))
    configs = {name: component_config(folder, name) for name in family.components}
    found = parts_in(file, pipeline, family, configs)
    if not is_here and (lacking := set(family.components) - set(found)):
        folder = _fetched(config, lacking, variant)
    return linked_folder(file, folder, found)


def _own(folder_or_id: str | Path) -> Path:
    try:
        return expanded_path(Path(folder_or_id))
    except ValueError as error:
        raise ModelError(f"{folder_or_id}: {error}") from None


def is_hub_id(folder_or_id: str | Path) -> bool:
    """Whether a text has the form owner/name of a hub's repository, and no file or folder here has that path."""
    # No part begins with a dot, so "./x" and "../x" are paths.
    is_shaped = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(folder_or_id)) is not None
    return is_shaped and not expanded_path(Path(folder_or_id)).exists()


def reads_estimate(folder: Path) -> bool:
    """Whether the denoiser in a folder has twice the input channels of its samples, for its own estimate.

    Raises ModelError for a folder of another kind.
    """
    family = family_of(folder)
    config = component_config(folder, family.trainable[0])
    return family.convolution is not None and plain_config(config, _latent_channels(folder)) != config


def reads_coordinates(folder: Path) -> bool:
    """Whether the denoiser in a folder has input channels for coordinates, because it was trained on patches.

    Raises ModelError for a folder of another kind.
    """
    family = family_of(folder)
    return family.places is not None and has_coordinates(component_config(folder, family.trainable[0]))


def open_components(folder: Path, *, is_plain: bool = False) -> dict[str, nn.Module]:
    """Name -> module, with parameters on the meta device, of each component of a diffusers folder that its family has.

    Buffers are real: those that are not stored among the weights, such as position tables, are computed by the
    constructors. With `is_plain` a denoiser that reads its own estimate or coordinates is made as if it did not;
    `self_conditioned` or `with_coordinates` widens it again.

    Raises ModelError with every problem found.
    """
    family = family_of(folder)
    index = model_index(folder)
    problems = []
    for name, kind in family.components.items():
        entry = index.get(name)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found != kind:
            problems.append(f"{folder / 'model_index.json'}: {name} is {found}; supported: {kind}")
        elif not (folder / name / "config.json").is_file():
            problems.append(f"{folder / name / 'config.json'} is missing")
    problems += [
        f"{folder / 'model_index.json'}: {name} is {index[name][1]}; models with it are not supported"
        for name in family.absent
        if name in index and index[name] != [None, None]
    ]
    problems += [
        f"{folder / 'model_index.json'}: {name} is {index[name]}; supported: {value}"
        for name, value in family.settings.items()
        if index.get(name, value) != value
    ]
    if problems:
        raise ModelError("\n".join(problems))
    configs = {name: _read_json(folder / name / "config.json") for name in family.components}
    denoiser = family.trainable[0]
    if is_plain and family.places is not None:
        configs[denoiser] = without_coordinates(configs[denoiser])
    if is_plain and family.convolution is not None:
        configs[denoiser] = plain_config(configs[denoiser], _latent_channels(folder))
    return {
        name: module_on_meta(kind, configs[name], source=folder / name / "config.json")
        for name, kind in family.components.items()
    }


def _latent_channels(folder: Path) -> int:
    channels = component_config(folder, "vae").get("latent_channels", 4)
    return channels if isinstance(channels, int) else 0


def scheduler_config(folder: Path, component: str = "scheduler") -> dict[str, Any]:
    """The configuration of one of the folder's schedulers, from its scheduler_config.json.

    Raises ModelError if it is missing, or has nulls where its class needs values.
    """
    import diffusers

    path = folder / component / "scheduler_config.json"
    config = _read_json(path)
    kind = getattr(diffusers, str(config.get("_class_name")), None)
    if isinstance(kind, type):
        check_nulls(kind, config, source=path)
    return config


def component_config(folder: Path, component: str) -> dict[str, Any]:
    """The configuration of a component of the folder, from its config.json. Raises ModelError if it is missing.

    The field `quantization_config` is left out: weights are read as wide ones, and exports hold wide ones.
    """
    found = _read_json(folder / component / "config.json")
    return {key: value for key, value in found.items() if key != "quantization_config"}


def refuse_narrow_export(folder: Path, family: Family) -> None:
    """Check that the folder's model was not written by `export --quantize`, which can only be drawn from.

    Raises ModelError if it was.
    """
    for name in family.components:
        path = folder / name / "config.json"
        width = width_of(_read_json(path), path) if path.is_file() else None
        if width is not None:
            raise ModelError(
                f"{folder} is a narrow export ({name} in {width}), from which pictures are drawn and nothing else; "
                "give the model that it was made from"
            )


def weight_sources(
    folder: Path, graph: LayerGraph, *, variant: str | None = None, from_scratch: bool = False
) -> dict[str, StoredWeights | None]:
    """Component with parameters -> the files of its weights; None if it is trained and starts `from_scratch`.

    The names and shapes in the files are compared with the components' own; no tensor is read. With a `variant`, e.g.
    "fp16", files of this variant go before plain ones.

    Raises ModelError for weights that are missing, damaged, or belong to another component.
    """
    sources: dict[str, StoredWeights | None] = {}
    problems = []
    for name, component in graph.components.items():
        parameters = list(component.parameters())
        if not parameters:
            continue
        # Adapters start at zero and change weights that must be there, so nothing of such a component is drawn.
        has_adapters = any(is_adapter(key) for key, _ in component.named_parameters())
        is_trained = any(parameter.requires_grad for parameter in parameters)
        if from_scratch and is_trained and not has_adapters:
            sources[name] = None
            continue
        try:
            found = stored_weights(folder / name, variant)
            if found is None:
                why = f"and {name} is not trained"
                if has_adapters:
                    why = "and adapters need pretrained weights"
                elif is_trained:
                    why = "and would start from random ones; get the model again, or set model.from_scratch = true"
                problems.append(missing_weights(folder / name, why))
                continue
            problems += misfits_of(graph, name, found)
            sources[name] = found
        except ModelError as error:
            problems.append(str(error))
    if problems:
        more = [f"{len(problems) - _SAID} more of its components cannot be read"] if len(problems) > _SAID else []
        raise ModelError("\n".join(problems[:_SAID] + more))
    return sources


def open_component(folder: Path, name: str, *, device: torch.device, variant: str | None = None) -> Any:
    """One component of a folder with all its weights in float32 on the device, in evaluation mode.

    Raises ModelError for a folder of another kind, and for weights that are missing, damaged, or not the component's.
    """
    config = component_config(folder, name)
    module = module_on_meta(family_of(folder).components[name], config, source=folder / name / "config.json")
    found = stored_weights(folder / name, variant)
    if found is None:
        raise ModelError(missing_weights(folder / name, "and they are needed here; get the model again"))
    fill(name, module, found, device=device)
    return module.eval()


def family_of(folder: Path) -> Family:
    """The family of the pipeline in the folder, ours or one that a package offers.

    Raises ModelError if there is none, or the folder has no model_index.json.
    """
    index = model_index(folder)
    name = str(index.get("_class_name"))
    if name not in REGISTRY:
        found = load(Kind.FAMILY, name)
        if isinstance(found, Family):
            return found
        if found is not None:
            raise ModelError(f"the family {name!r} that a package offers is a {type(found).__name__}, not a Family")
        raise ModelError(
            f"{folder} is a {name}; supported pipelines: {', '.join(sorted(REGISTRY))}{_unknown_to_diffusers(name)}"
        )
    # Both models of a cascade are DDPMPipelines; the channels tell which one it is.
    if REGISTRY[name] is class_unet.BASE and class_unet.is_super_resolution(component_config(folder, "unet")):
        return class_unet.SUPER_RESOLUTION
    return REGISTRY[name]


def _unknown_to_diffusers(name: str) -> str:
    """A line for an error which says that the installed diffusers has no pipeline of this name; "" if it has one."""
    import diffusers

    if hasattr(diffusers, name):
        return ""
    return f"\ndiffusers {diffusers.__version__}, which is installed here, has no {name} either"


def model_index(folder: Path) -> dict[str, Any]:
    """The contents of the folder's model_index.json: the classes of its components, and settings of the pipeline.

    Raises ModelError if it is missing or unreadable.
    """
    return _read_json(folder / "model_index.json")


def is_component(entry: object) -> bool:
    """Whether an entry of model_index.json names the class of a component, or says with two nulls that there is none.

    Other lists are settings of the pipeline.
    """
    return isinstance(entry, list) and len(entry) == 2 and all(part is None or isinstance(part, str) for part in entry)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} is missing; a model is a folder as diffusers' save_pretrained writes it")
    try:
        content = read_json(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content

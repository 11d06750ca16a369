"""Exports a checkpoint as a complete diffusers folder, or as a folder of adapters that diffusers' pipelines load."""

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusionpipe.errors import CheckpointError, ModelError
from diffusionpipe.models.base.coordinates import NUM_COORDINATES
from diffusionpipe.models.base.self_conditioning import widened_config
from diffusionpipe.models.graphs.widening import widen
from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.opening.folder import (
    component_config,
    family_of,
    is_component,
    open_component,
    open_components,
    scheduler_config,
)
from diffusionpipe.models.opening.pipeline_defaults import default_guidance
from diffusionpipe.models.parameters.adapter_names import Weights
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora, is_adapter
from diffusionpipe.models.parameters.lora_file import load_adapters, merge_adapters, save_adapters
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.models.parameters.single_file.reading import POINTER
from diffusionpipe.models.parameters.stored import StoredWeights, opened, stored_weights
from diffusionpipe.models.parameters.weights import names_in, tensors_of
from diffusionpipe.trainer.checkpoints.checkpoint import read, verify
from diffusionpipe.trainer.checkpoints.manifest import MANIFEST, read_manifest
from diffusionpipe.trainer.checkpoints.tensor_files import stored_tensors
from diffusionpipe.trainer.checkpoints.training_state import EMA, MODEL
from diffusionpipe.trainer.exports.adapter_files import comfy_file, write_adapter_files
from diffusionpipe.trainer.exports.adapter_header import AdapterFacts
from diffusionpipe.trainer.exports.card_snippet import FILLING, Example
from diffusionpipe.trainer.exports.model_card import Adapters, Card, model_card, public_name
from diffusionpipe.trainer.inference.clip_rate import kept_rate
from diffusionpipe.trainer.inference.conditions import num_classes_of
from diffusionpipe.trainer.model.guidance import drawn_guidance
from diffusionpipe.trainer.model.members import captions_of, sample_size
from diffusionpipe.trainer.model.scheduler import sampling_scheduler
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.model_section import AdapterFormat

_INDEX = "model_index.json"
_CONFIG = "config.json"
_SCHEDULER = "scheduler"
_SCHEDULER_CONFIG = "scheduler_config.json"
# Weights that a source folder may hold several times: other formats and variants; what is read is copied by itself.
_WEIGHTS = (
    POINTER,
    *("*.safetensors", "*.bin", "*.safetensors.index.*json", "*.bin.index.*json"),
    *("*.msgpack", "*.msgpack.index.json", "*.h5", "*.ckpt", "*.onnx", "*.onnx_data"),
)
_DTYPES = ("torch_dtype", "dtype")
"""The keys of a configuration under which transformers writes the type of the weights."""
# Components that diffusers' pipelines can do without, and that a download for training leaves out.
_OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")
_JSON = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The settings of an export: the source folder, the trained components, adapters, and facts for its model card."""

    source_model: Path
    """The diffusers folder from which the training started; all that was not trained comes from it."""
    variant: str | None = None
    """The variant of the source folder's weights; see `stored_weights`."""
    trained: Mapping[str, str]
    """The trained components with the prefix of their canonical names, e.g. {"unet": "unet."}."""
    prediction: Prediction
    """The quantity that the denoiser has learnt to predict."""
    untrained: Collection[str] = ()
    """Parameters of trained components that do not learn, e.g. {"transformer.blocks.2.bias"}; see `models.cut.unread`.

    For a component with adapters these are all of its own weights, by their names beside the adapters.
    """
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of `untrained` parameters that the source folder does not have, by the same names."""
    shift: float | None = None
    """The shift of the times towards noise that the recipe states, for flow matching; None: the source folder's."""
    has_learned_range: bool = False
    """Whether the denoiser has learnt variances, too."""
    use_ema: bool = True
    """Whether the moving average is exported where the checkpoint has one."""
    base_model: str | None = None
    """The base model as the recipe names it; the source folder's name if None."""
    recipe: Recipe | None = None
    """The recipe, for the model card; None where there is none."""
    self_conditioning: bool = False
    """Whether the denoiser reads its own estimate."""
    is_placed: bool = False
    """Whether the denoiser reads coordinates, because it was trained on patches."""
    lora: LoraSettings | None = None
    """The settings of adapters if they alone were trained; then `trained` has the components with adapters. None
    without adapters."""
    is_merged: bool = False
    """Whether adapters are added to the weights of the base model, instead of being exported alone."""

    @property
    def is_widened(self) -> bool:
        """Whether the denoiser has more input channels than the source folder's denoiser."""
        return self.self_conditioning or self.is_placed


def export(checkpoint: Path, destination: Path, settings: Export) -> Path:
    """Writes `destination`, a folder that diffusers' `DiffusionPipeline.from_pretrained` opens, and returns its path.

    If adapters are not merged, the folder holds them alone, and `load_lora_weights` of diffusers' pipelines reads it.
    One process calls it; the weights of one trained component at a time are in memory. An existing export is replaced
    only when the new one is complete. The weights have the type of the checkpoint, a moving average float32.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks weights of a trained component, or a file cannot be written.
        ModelError: the source folder is incomplete, or adapters have no name or no room in a wanted format.
    """
    verify(checkpoint)
    index = _read_json(settings.source_model / _INDEX)
    original = dict(index)  # `index` loses what the export leaves out
    temporary = destination.with_name(f".{destination.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        modules = open_components(settings.source_model, is_plain=settings.is_widened)
        if settings.is_widened:
            _widen(modules, settings)
        if absent := [component for component in settings.trained if component not in modules]:
            raise ModelError(f"{settings.source_model} has no component {absent[0]}; it has {', '.join(modules)}")
        if settings.lora is not None and not settings.is_merged:
            trained = _with_adapters(modules, settings)
            adapters, has_ema = _adapters_in(checkpoint, trained, settings)
            write_adapter_files(adapters, temporary, trained, _facts(settings, checkpoint), _weights_of(settings))
        else:
            has_ema = _write_model(checkpoint, temporary, modules, settings, index)
        card = _card(settings, original, index, step=read_manifest(checkpoint).step, is_average=has_ema)
        (temporary / "README.md").write_text(model_card(card), encoding="utf-8")
        _make_readable(temporary)
        _replace(temporary, destination)
    except OSError as error:
        raise CheckpointError(f"the export {destination} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return destination


def export_adapters(checkpoint: Path, destination: Path, modules: Mapping[str, nn.Module], settings: Export) -> Path:
    """Writes `destination`, a folder with the adapters of a checkpoint that was just written, and returns its path.

    `modules`: the session's components, with their adapters. Only names and sizes are read, so another thread may train
    them meanwhile.

    Raises:
        CheckpointError: the checkpoint lacks adapters, or the files cannot be written.
        ModelError: adapters have no name or no room in a wanted format.
    """
    temporary = destination.with_name(f".{destination.name}.writing")
    trained = {name: modules[name] for name in settings.trained}
    try:
        # Of a process that was killed; one thread at a time writes adapters.
        for left in destination.parent.glob(".*.writing"):
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
        adapters, _ = _adapters_in(checkpoint, trained, settings)
        facts = _facts(settings, checkpoint)
        facts = replace(facts, name=f"{facts.name}-{checkpoint.name}")
        write_adapter_files(adapters, temporary, trained, facts, _weights_of(settings))
        _replace(temporary, destination)
    except OSError as error:
        raise CheckpointError(f"the adapters {destination} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return destination


def _widen(modules: Mapping[str, nn.Module], settings: Export) -> None:
    """Adds the input channels for its own estimate or for coordinates to the denoiser and its configuration."""
    family = family_of(settings.source_model)
    denoiser: Any = modules[family.trainable[0]]
    channels = denoiser.config.in_channels
    # An estimate has as many channels as the latents.
    more, name = (NUM_COORDINATES, family.places) if settings.is_placed else (channels, family.convolution)
    assert name is not None
    widen(denoiser, name, more)
    denoiser.register_to_config(**widened_config(denoiser, more))


def _card(settings: Export, original: _JSON, index: _JSON, *, step: int, is_average: bool) -> Card:
    """The facts on the model card.

    `original`, `index`: the model_index.json of the source folder and of the export.
    """
    kept = [name for name, entry in index.items() if _is_used(entry)]
    recipe, source = settings.recipe, settings.source_model
    guidance = default_guidance(source) if recipe is None else drawn_guidance(recipe, source)
    example = Example(guidance=guidance, num_classes=_num_classes(source))
    if recipe is not None:
        drawn = recipe.sampling
        prompt, label = next(iter(drawn.prompts), example.prompt), next(iter(drawn.labels), example.label)
        example = replace(example, prompt=prompt, label=label, steps=drawn.steps, captions=captions_of(recipe))
        example = with_size(example, recipe)
    return Card(
        pipeline=_drawing_pipeline(settings, index),
        base_model=settings.base_model or source.name,
        trained=tuple(settings.trained),
        prediction=settings.prediction,
        step=step,
        is_average=is_average,
        copied=tuple(name for name in kept if name not in settings.trained and name != _SCHEDULER),
        left_out=tuple(name for name, entry in original.items() if _is_used(entry) and name not in kept),
        own_scheduler=scheduler_config(source),
        scheduler=_sampling_scheduler(settings),
        example=example,
        recipe=recipe,
        self_conditioning=settings.self_conditioning,
        is_placed=settings.is_placed,
        adapters=_adapters_on_card(settings),
    )


def with_size(example: Example, recipe: Recipe) -> Example:
    """The example with the size and the frame rate at which the recipe's run draws; of several sizes the largest."""
    size, data = sample_size(recipe), recipe.data
    rate = data.frame_rate or kept_rate(recipe.run.folder) if size.frames > 1 else None
    resolution, height, frames = size.stated
    return replace(example, resolution=resolution, height=height, frames=frames, frame_rate=rate)


def _drawing_pipeline(settings: Export, index: _JSON) -> str:
    """The name of the pipeline that draws from the export; for an inpainting denoiser it is the inpainting pipeline."""
    name = str(index.get("_class_name"))
    fills_holes = settings.recipe is not None and settings.recipe.data.masks is not None
    return FILLING.get(name, name) if fills_holes else name


def _adapters_on_card(settings: Export) -> Adapters | None:
    if settings.lora is None:
        return None
    recipe, comfy = settings.recipe, None
    if recipe is not None and AdapterFormat.COMFY in recipe.lora.formats and not settings.is_merged:
        comfy = comfy_file(recipe.run.folder.resolve().name)
    trigger = None if recipe is None else recipe.trigger
    return Adapters(settings.lora.rank, is_merged=settings.is_merged, comfy=comfy, trigger=trigger)


def _num_classes(source: Path) -> int | None:
    """The number of classes of the folder's denoiser; None if it reads no classes."""
    return num_classes_of(component_config(source, family_of(source).trainable[0]))


def _is_used(entry: object) -> bool:
    """Whether an entry of model_index.json names a component."""
    return is_component(entry) and entry != [None, None]


def _write_model(
    checkpoint: Path, destination: Path, modules: Mapping[str, nn.Module], settings: Export, index: _JSON
) -> bool:
    """Writes the whole model into a folder; returns whether trained weights are moving averages.

    `index`: the content of model_index.json, which it changes.
    """
    _copy_frozen(settings, index, destination)
    has_ema = False
    if settings.lora is not None:
        has_ema = _write_merged(checkpoint, destination, _with_adapters(modules, settings), settings)
    else:
        for component, prefix in settings.trained.items():
            has_ema |= _write_component(checkpoint, destination / component, modules[component], prefix, settings)
    index[_SCHEDULER] = _write_scheduler(settings, index, destination / _SCHEDULER)
    _write_json(destination / _INDEX, index)
    return has_ema


def _with_adapters(modules: Mapping[str, nn.Module], settings: Export) -> dict[str, nn.Module]:
    """The trained components by name, to which adapters are added as for the training."""
    assert settings.lora is not None
    trained = {name: modules[name] for name in settings.trained}
    for component, module in trained.items():
        for name, parameter in module.named_parameters():
            if f"{component}.{name}" in settings.untrained:  # weights with an adapter have another name there
                parameter.requires_grad_(False)
    add_lora(trained, tuple(trained), settings.lora)
    return trained


def _adapters_in(
    checkpoint: Path, modules: Mapping[str, nn.Module], settings: Export
) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """The adapters in a checkpoint, by component and by their names in it, and whether averages are among them."""
    adapters, has_average = {}, False
    for component, module in modules.items():
        names = [name for name in module.state_dict() if is_adapter(name)]
        prefix = settings.trained[component]
        adapters[component], is_average = _trained_tensors(
            checkpoint, names, component, prefix, use_ema=settings.use_ema
        )
        has_average |= is_average
    return adapters, has_average


def _weights_of(settings: Export) -> Weights:
    """A function (component, layers) that reads the weights of layers of the source model, by the layers' names."""

    def read_weights(component: str, layers: Collection[str]) -> dict[str, Tensor]:
        source = stored_weights(settings.source_model / component, settings.variant)
        if source is None:
            raise ModelError(f"{settings.source_model / component} has no weights; restore them")
        plain = open_components(settings.source_model)[component]  # a session's may be sharded
        found = tensors_of(component, plain, source, [f"{layer}.weight" for layer in layers])
        return {layer: found[f"{layer}.weight"] for layer in layers}

    return read_weights


def _facts(settings: Export, checkpoint: Path) -> AdapterFacts:
    """The facts in the headers of the files of adapters; their date is the date of the checkpoint."""
    assert settings.lora is not None
    source, recipe = settings.source_model, settings.recipe
    base = public_name(settings.base_model or source.name)
    # An export that is made again has the same date, and so equal files.
    saved = (checkpoint / MANIFEST).stat().st_mtime
    return AdapterFacts(
        pipeline=str(_read_json(source / _INDEX).get("_class_name")),
        config=component_config(source, family_of(source).trainable[0]),
        base_model=base,
        settings=settings.lora,
        prediction=settings.prediction,
        step=read_manifest(checkpoint).step,
        date=datetime.fromtimestamp(saved, UTC),
        name=base.rpartition("/")[2] if recipe is None else recipe.run.folder.resolve().name,
        recipe=recipe,
    )


def _write_merged(checkpoint: Path, destination: Path, modules: Mapping[str, nn.Module], settings: Export) -> bool:
    """Writes the components with the adapters added to their weights; returns whether the adapters are averages."""
    assert settings.lora is not None
    adapters, is_average = _adapters_in(checkpoint, modules, settings)
    # The components get them by the way that a user's pipeline takes, from a file.
    save_adapters(adapters, destination, modules, settings.lora)
    for component in modules:
        folder = destination / component
        merged = open_component(settings.source_model, component, device=torch.device("cpu"), variant=settings.variant)
        load_adapters(merged, destination, component)
        merge_adapters(merged)
        merged.save_pretrained(folder, safe_serialization=True)
        _write_as_source(folder, merged, settings)
    (destination / ADAPTERS).unlink()
    return is_average


def _copy_frozen(settings: Export, index: _JSON, destination: Path) -> None:
    """Copies the components that were not trained into the export; their links are resolved.

    `index`: the content of model_index.json, from which it removes optional components that the source folder lacks.
    The scheduler is not copied.
    """
    for name, entry in tuple(index.items()):  # entries change below
        if not _is_used(entry) or name in settings.trained or name == _SCHEDULER:
            continue
        source = settings.source_model / name
        if not source.is_dir() and name in _OPTIONAL:
            logger.warning("export=%s component=%s reason=not_in_the_source_folder", destination, name)
            index[name] = [None, None]
            continue
        if not source.is_dir():
            raise ModelError(f"{settings.source_model / _INDEX} names the component {name}, but {source} is missing")
        stored = stored_weights(source, settings.variant)
        # All but weights, of which one form is enough.
        shutil.copytree(source, destination / name, ignore=shutil.ignore_patterns(*_WEIGHTS) if stored else None)
        if stored:
            _copy_weights(stored, destination / name, is_diffusers=entry[0] == "diffusers")


def _copy_weights(stored: StoredWeights, folder: Path, *, is_diffusers: bool) -> None:
    """Copies the files of a component's weights under their plain names, which every program looks for first.

    `is_diffusers`: whether the component is diffusers' own, not one of transformers.
    """
    for file in stored.files:
        if file.name == POINTER:  # a part of a model in one file
            with opened(file) as tensors:
                name = "diffusion_pytorch_model" if is_diffusers else "model"
                values = {key: tensors.get(key) for key in tensors.names()}
                save_file(values, folder / f"{name}.safetensors", metadata={"format": "pt"})
            continue
        shutil.copyfile(file, folder / stored.plain_name(file))
    if stored.index is not None:
        content = _read_json(stored.index)
        names = {file.name: stored.plain_name(file) for file in stored.files}
        table = {tensor: names[file] for tensor, file in content["weight_map"].items()}
        _write_json(folder / stored.plain_name(stored.index), content | {"weight_map": table})


def _write_component(checkpoint: Path, folder: Path, module: nn.Module, prefix: str, settings: Export) -> bool:
    """Writes the configuration and weights of one trained component; returns whether the weights are averages."""
    untrained = {name for name in module.state_dict() if f"{folder.name}.{name}" in settings.untrained}
    kept = _kept(module, settings.source_model / folder.name, untrained, settings.variant)
    # Values that were put in by the recipe come before the folder's.
    kept |= {name: settings.fixed.get(f"{folder.name}.{name}", kept[name]) for name in untrained}
    names = [name for name in module.state_dict() if name not in kept]
    tensors, is_average = _trained_tensors(checkpoint, names, folder.name, prefix, use_ema=settings.use_ema)
    dtype = next(iter(tensors.values())).dtype  # a component is saved in one type
    kept |= {name: kept[name].to(dtype) for name in untrained}
    _fill(module, kept | tensors, checkpoint)
    library_module: Any = module  # diffusers' and transformers' classes share this method, not a base class
    library_module.save_pretrained(folder, safe_serialization=True)
    _write_as_source(folder, module, settings)
    return is_average


def _write_as_source(folder: Path, module: nn.Module, settings: Export) -> None:
    """Gives a written component the configuration of the source folder and its names of tensors.

    Today's libraries write settings that earlier versions do not know, or know by other names.
    """
    source, path = settings.source_model / folder.name / _CONFIG, folder / _CONFIG
    written, own = _read_json(path), _read_json(source)
    is_widened = settings.is_widened and "in_channels" in written  # a text encoder is not
    changed = {key: written[key] for key in ("in_channels", "out_channels") if is_widened}
    changed |= {key: str(_dtype_in(folder)).removeprefix("torch.") for key in _DTYPES if key in own}
    if own | changed == own:
        shutil.copyfile(source, path)  # the same text, not the same values alone
    else:
        _write_json(path, own | changed)
    _rename_as_source(folder, module, settings)


def _dtype_in(folder: Path) -> torch.dtype:
    """The type of the weights in a written component's folder, which is the same for all."""
    written = stored_weights(folder)
    assert written is not None, "save_pretrained has written weights"
    with opened(written.files[0]) as tensors:
        return next(tensor.dtype for tensor in map(tensors.get, tensors.names()) if tensor.is_floating_point())


def _rename_as_source(folder: Path, module: nn.Module, settings: Export) -> None:
    """Gives the tensors of a written component the names that they have in the source folder.

    transformers 5 writes other names than earlier versions, which would take random values for tensors that they do not
    find.
    """
    source = stored_weights(settings.source_model / folder.name, settings.variant)
    names = names_in(module, source) if source is not None else {}
    written = stored_weights(folder)
    assert written is not None, "save_pretrained has written weights"
    for file in written.files if names else ():  # nothing to rename where the source has none, or the same names
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata()
            renamed = {names.get(name, name): content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no dict)
        new = file.with_name(f"{file.name}.new")
        save_file(renamed, new, metadata=metadata)
        new.replace(file)
    if names and written.index is not None:
        content = _read_json(written.index)
        table = {names.get(name, name): file for name, file in content["weight_map"].items()}
        _write_json(written.index, content | {"weight_map": table})


def _trained_tensors(
    checkpoint: Path, names: Sequence[str], component: str, prefix: str, *, use_ema: bool
) -> tuple[dict[str, Tensor], bool]:
    """The tensors of a component in a checkpoint, by their names in it, and whether averages are among them.

    `prefix`: of their canonical names. `use_ema`: take the average of a tensor where there is one.
    """
    stored = stored_tensors(checkpoint)
    tensors: dict[str, Tensor] = {}
    name_in_module: dict[str, str] = {}
    missing = []
    for name in names:
        average, plain = EMA + prefix + name, MODEL + prefix + name
        source = average if use_ema and average in stored else plain
        if source not in stored:
            missing.append(prefix + name)
            continue
        tensors[source] = torch.empty_like(stored[source], device="cpu")
        name_in_module[source] = name
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} of {len(missing) + len(tensors)} tensors of {component}: "
            f"{', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}; was it trained from another model?"
        )
    read(checkpoint, tensors)
    has_ema = any(source.startswith(EMA) for source in tensors)
    return {name_in_module[source]: tensor for source, tensor in tensors.items()}, has_ema


def _kept(module: nn.Module, source: Path, untrained: Collection[str], variant: str | None) -> dict[str, Tensor]:
    """The untrained tensors that are saved with a module: buffers such as SD3's positions, and `untrained` parameters.

    They are keyed by name and have the source folder's values. A buffer that it lacks has its computed value, a
    parameter that it lacks is zero.
    """
    stored = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored}
    kept = buffers | {name: stored[name] for name in untrained}
    files = stored_weights(source, variant) if kept else None
    if files is not None:
        kept |= tensors_of(source.name, module, files, list(kept))
    # A model that was trained from scratch has no source of them. Nothing depends on them, so zeros do.
    return {name: torch.zeros_like(t, device="cpu") if t.is_meta else t for name, t in kept.items()}


def _fill(module: nn.Module, weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Puts the weights into a module on the meta device, in place of its parameters.

    Raises:
        CheckpointError: names or shapes differ.
    """
    try:
        # The module is on the meta device, so its parameters are replaced.
        module.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint} does not fit the source model: {error}") from error


def _write_scheduler(settings: Export, index: _JSON, folder: Path) -> list[str]:
    """Writes the scheduler that samples the trained model; returns its entry in model_index.json."""
    entry = index.get(_SCHEDULER)
    library, name = entry if isinstance(entry, list) and len(entry) == 2 else ("diffusers", None)
    source = settings.source_model / _SCHEDULER / _SCHEDULER_CONFIG
    config = _sampling_scheduler(settings)
    own = config.get("_class_name", name)
    folder.mkdir()
    if config == _read_json(source):
        shutil.copyfile(source, folder / _SCHEDULER_CONFIG)  # the same text, not the same values alone
    else:
        _write_json(folder / _SCHEDULER_CONFIG, config | {"_class_name": own})
    return [str(library) if own == name else "diffusers", str(own)]


def _sampling_scheduler(settings: Export) -> dict[str, Any]:
    return sampling_scheduler(
        settings.source_model,
        settings.prediction,
        settings.shift,
        has_learned_range=settings.has_learned_range,
    )


def _make_readable(folder: Path) -> None:
    """Gives all files in the folder the permissions of new files; safetensors makes files for their owner alone."""
    mode = (folder / "README.md").stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _replace(temporary: Path, destination: Path) -> None:
    """Renames the finished folder `temporary` to `destination`, in place of an older folder."""
    old = destination.with_name(f".{destination.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    try:
        temporary.rename(destination)
    except OSError:
        if old.exists():
            old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _read_json(path: Path) -> _JSON:
    """The JSON object in a file of the source folder.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON object into a file, in the form in which diffusers writes it."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

"""The models that a recipe trains, before they have weights or a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError, ModelError, RecipeError
from diffusionpipe.models.base.family import CaptionReading, Clip, LowResolution
from diffusionpipe.models.compose.cascade import cascade_graph, names_elsewhere
from diffusionpipe.models.compose.common_encoders import OpenedModel, common_encoders
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import LayerGraph, canonical_names
from diffusionpipe.models.objectives.flow_shift import is_flow_scheduler
from diffusionpipe.models.objectives.noise_levels import refuse_unknown
from diffusionpipe.models.objectives.objective_settings import DEFAULTS, ObjectiveSettings, Prediction
from diffusionpipe.models.objectives.sample_weights import with_sample_weights
from diffusionpipe.models.opening.folder import (
    build_graph,
    family_of,
    model_index,
    resolve_folder,
    scheduler_config,
    weight_sources,
)
from diffusionpipe.models.parameters.adapter_names import check_readable
from diffusionpipe.models.parameters.class_embeddings import class_tables, values_of_tables
from diffusionpipe.models.parameters.lora import adapted_layers
from diffusionpipe.models.parameters.lora_start import StartedAdapters, started_adapters
from diffusionpipe.models.parameters.stored import StoredWeights
from diffusionpipe.models.parameters.stored_linear import parts_of, store, stored_layers
from diffusionpipe.models.parameters.weights import factors
from diffusionpipe.runtime.job.agreement import on_all
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.data.sizes.patches import patch_sizes
from diffusionpipe.trainer.model.decisions import decided_by_job
from diffusionpipe.trainer.model.guidance import check_guidance
from diffusionpipe.trainer.model.lora import form_of, frozen_dtype_of, lora_of
from diffusionpipe.trainer.optim.rounding import Rounding
from diffusionpipe.trainer.recipe import ObjectiveKind, Recipe, RecipePrecision, Variance
from diffusionpipe.trainer.recipe.model_folder import problem_of_masks
from diffusionpipe.trainer.recipe.model_section import AdapterFormat, FrozenArithmetic, stored_form
from diffusionpipe.trainer.recipe.size_rules import sizes_of
from diffusionpipe.trainer.recipe.training_section import KeptWeights, Rounded, Summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the models that a recipe trains, on the meta device; its name is "" where it is the only one."""

    name: str
    """The model's name in the recipe, "base" of [models.base]; "" for the only model."""
    recipe: Recipe
    """The recipe of this model alone."""
    folder: Path
    """The diffusers folder of the model."""
    prediction: Prediction
    """The quantity that the denoiser predicts."""
    low: LowResolution | None
    """The small pictures that a model of super-resolution reads; None for any other model."""
    graph: LayerGraph
    """The graph of this model alone, on the meta device."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Name of a component or tensor that the model shares with another one -> its name in the graph of all models."""

    def component(self, name: str) -> str:
        """The name of one of the model's components or raw inputs in the graph of all models."""
        return self.elsewhere.get(name, f"{self.name}/{name}" if self.name else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeModels:
    """The models that a recipe trains, before they have weights or a plan; the same on every rank."""

    recipe: Recipe
    members: tuple[Member, ...]
    """The models, in the order of sampling."""
    graph: LayerGraph
    """The layer graph of all models, for the first size of samples."""
    model: ModelGraph
    """The description of `graph`, without torch."""
    device: str
    """The kind of device that will train the models, e.g. "cuda"."""
    others: tuple[ModelGraph, ...] = ()
    """The descriptions of the graphs `graph.others`, one for each further size of samples."""

    @property
    def folder(self) -> Path:
        """The diffusers folder of the only model; it fails where there are several models."""
        return only(self.members).folder

    @property
    def prediction(self) -> Prediction:
        """The quantity that the only model predicts; it fails where there are several models."""
        return only(self.members).prediction


def only(members: Sequence[Member]) -> Member:
    """The one model of a run that trains one model.

    Raises:
        ValueError: there are several models.
    """
    (member,) = members
    return member


def folder_of(recipe: Recipe) -> Path:
    """The diffusers folder of the model of a recipe of one model; it is made first for a hub id or a single file.

    Raises:
        ModelError: there is no such model.
    """
    return resolve_folder(recipe.model.path, recipe.model.variant, recipe.model.config)


def prediction_of(recipe: Recipe, folder: Path) -> Prediction:
    """The quantity that the denoiser predicts: as the recipe says or, for "auto", as the folder's scheduler does.

    Raises:
        ConfigError: the scheduler names none that can be trained.
    """
    if recipe.objective.kind is not ObjectiveKind.AUTO:
        return Prediction(recipe.objective.kind.value)
    return stored_prediction(folder)


def stored_prediction(folder: Path) -> Prediction:
    """The quantity that the denoiser in a diffusers folder predicts, by its scheduler.

    Raises:
        ConfigError: the scheduler is not supported, or it names a quantity that cannot be trained.
    """
    config = scheduler_config(folder)
    refuse_unknown(str(config.get("_class_name")))
    if is_flow_scheduler(config):
        return Prediction.FLOW_MATCHING
    kind = str(config.get("prediction_type", "epsilon"))
    if kind not in {"epsilon", "v_prediction"}:
        raise ConfigError(
            f"scheduler_config.json of {folder} says that the model predicts {kind!r}; set objective.kind to what it "
            "predicts"
        )
    return Prediction(kind)


def objective_of(recipe: Recipe, folder: Path) -> ObjectiveSettings:
    """The settings of the loss as the recipe and the folder's scheduler state them."""
    return ObjectiveSettings(
        prediction=prediction_of(recipe, folder),
        min_snr_gamma=recipe.objective.snr_gamma,
        **{key: getattr(recipe.objective, key) for key in DEFAULTS},
        shift=recipe.objective.shift,
        self_conditioning=recipe.objective.self_conditioning,
        has_learned_range=learns_variance(recipe, folder),
    )


def learns_variance(recipe: Recipe, folder: Path) -> bool:
    """Whether the denoiser also learns the variance of each denoising step.

    The recipe decides or, if it does not say it, the scheduler of the model's folder.
    """
    stated = recipe.objective.variance
    if stated is not None:
        return stated is Variance.LEARNED_RANGE
    if not family_of(folder).has_variances or prediction_of(recipe, folder) is Prediction.FLOW_MATCHING:
        return False
    return scheduler_config(folder).get("variance_type") == "learned_range"


def low_resolution_of(recipe: Recipe, folder: Path, name: str, before: int | None) -> LowResolution | None:
    """The side and noise of the small pictures that a recipe's model of super-resolution reads, None for other models.

    Args:
        recipe: the recipe of this model alone.
        folder: the diffusers folder of the model.
        name: the model's name among several; "" for the only one.
        before: the side of the pictures that the model before draws, the default of the side; None for the first.

    Raises:
        RecipeError: the size of the small pictures is not known, or a key about them has no effect.
    """
    section = f"models.{name}" if name else "model"
    model, augmentation = recipe.model, family_of(folder).augmentation
    if augmentation is None:
        given = [key for key in ("low_resolution", "noise_augmentation") if getattr(model, key) is not None]
        if given:
            raise RecipeError(f"{section}.{given[0]}: {folder} reads no small pictures; remove it")
        return None
    resolution = model.low_resolution or before
    if resolution is None:
        moved = "" if not name else f", or put [{section}] after the section of the model that draws them"
        raise RecipeError(
            f"{section}.low_resolution: {folder} reads small pictures; set their side, e.g. "
            f"{recipe.data.resolution // 4}{moved}"
        )
    return LowResolution(resolution=resolution, augmentation=model.noise_augmentation or 0.5)


def clip_of(recipe: Recipe) -> Clip | None:
    """The size of a recipe's samples, the largest of several; None for squares of `data.resolution`."""
    sizes = sizes_of(recipe.data)
    if sizes:
        return None if sizes[0] == Clip.square(recipe.data.resolution) else sizes[0]
    return clip_of_size(recipe.data.resolution, recipe.data.height, recipe.data.frames)


def sample_size(recipe: Recipe) -> Clip:
    """The width, height and frames of a recipe's samples; of several sizes the largest."""
    return clip_of(recipe) or Clip.square(recipe.data.resolution)


def clip_of_size(resolution: int, height: int | None, frames: int | None) -> Clip | None:
    """The size of samples by three keys of [data]; None for square pictures: neither height nor frames is given."""
    if frames is None and height is None:
        return None
    return Clip(width=resolution, height=height or resolution, frames=frames or 1)


def captions_of(recipe: Recipe) -> CaptionReading:
    """The numbers of chunks and of skipped layers with which CLIP encoders read the recipe's captions."""
    return CaptionReading(chunks=recipe.data.caption_chunks, clip_skip=recipe.data.clip_skip)


def open_members(recipe: Recipe) -> tuple[tuple[Member, ...], LayerGraph]:
    """The models of a recipe on the meta device, and the layer graph of all: it reads configurations, and no weights.

    Raises:
        ConfigError: a folder or the objective is not one that can be trained.
    """
    recipes = {name: recipe.alone(name) for name in recipe.backbones}
    members: tuple[Member, ...] = ()
    for name, own in recipes.items():
        before = members[-1].recipe.data.resolution if members else None
        members += (open_member(own, folder_of(own), name, before=before),)
    graph = members[0].graph
    if recipe.models:
        common = common_encoders(
            {member.name: OpenedModel(member.folder, member.graph, member.recipe.model.variant) for member in members}
        )
        graph = cascade_graph({member.name: member.graph for member in members}, common)
        elsewhere = (names_elsewhere(member.graph, common[member.name]) for member in members)
        members = tuple(replace(member, elsewhere=names) for member, names in zip(members, elsewhere, strict=True))
    return members, graph


def build_model(recipe: Recipe, device: str, progress: Callable[[int, int], None] = lambda *_: None) -> RecipeModels:
    """The models of a recipe on the meta device, with the description of their layers as they will run on `device`.

    `progress` is called with (sizes of samples that are described, all sizes).

    Raises:
        ConfigError: a folder or the objective is not one that can be trained.
    """
    members, graph = open_members(recipe)
    source, models = ", ".join(str(member.folder) for member in members), list[ModelGraph]()
    try:
        # Autocast differs by the kind of device.
        for one in graph.of_sizes:
            models.append(describe(one, autocast=autocast_of(recipe), device=device))
            progress(len(models), len(graph.of_sizes))
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error
    model, *others = models
    return RecipeModels(recipe=recipe, members=members, graph=graph, model=model, device=device, others=tuple(others))


def open_member(recipe: Recipe, folder: Path, name: str = "", *, before: int | None = None) -> Member:
    """A model on the meta device by the recipe of this model alone: it reads configurations, and no weights.

    Args:
        recipe: the recipe of this model alone.
        folder: the diffusers folder of the model.
        name: the model's name among several; "" for the only one.
        before: the resolution of the model before it among several; None for the first.

    Raises:
        ConfigError: the folder, the objective or another key is not one that can be trained.
    """
    check_guidance(recipe, folder)
    check_masks(folder, is_masked=recipe.data.masks is not None, is_placed=recipe.data.patches is not None)
    low = low_resolution_of(recipe, folder, name, before)
    graph = build_graph(
        folder,
        objective=objective_of(recipe, folder),
        resolution=recipe.data.resolution,
        train=recipe.model.train or None,
        dtype="float64" if recipe.training.precision is RecipePrecision.FLOAT64 else "float32",
        lora=lora_of(recipe),
        low=low,
        clip=clip_of(recipe),
        captions=captions_of(recipe),
        others=_further_sizes(recipe, folder),
        is_placed=recipe.data.patches is not None,
        multiple=None if recipe.data.aspects is None else recipe.data.multiple,
    )
    if recipe.data.is_weighted:
        first, *others = (with_sample_weights(one, is_masked=recipe.data.has_loss_masks) for one in graph.of_sizes)
        graph = replace(first, others=tuple(others))
    if recipe.model.class_embeddings is not None:
        values_of_tables(recipe.model.class_embeddings, graph.components)  # refused here, before anything is read
        for table in class_tables(graph.components).values():
            table.requires_grad_(not recipe.model.freeze_class_embeddings)
    if AdapterFormat.COMFY in recipe.lora.formats:
        _check_names(graph, folder)
    # First: the parts of a stored layer keep types of their own.
    _store(graph, recipe)
    _cast(graph, recipe)
    prediction = prediction_of(recipe, folder)
    return Member(name=name, recipe=recipe, folder=folder, prediction=prediction, low=low, graph=graph)


def _further_sizes(recipe: Recipe, folder: Path) -> tuple[Clip, ...]:
    """All sizes of a recipe's samples, or of its patches, without the first one."""
    if recipe.data.patches is None:
        return sizes_of(recipe.data)[1:]
    return patch_sizes(recipe.data.resolution, is_encoded="vae" in family_of(folder).components)[1:]


def class_embeddings_of(member: Member) -> dict[str, Tensor]:
    """The embeddings of classes that are read from a file, by canonical name; {} where the recipe names none.

    Raises:
        ModelError: the file cannot be read, or its table does not fit the model.
    """
    place = member.recipe.model.class_embeddings
    return {} if place is None else values_of_tables(place, member.graph.components)


def check_masks(folder: Path, *, is_masked: bool, is_placed: bool) -> None:
    """Refuses masks for a model that reads none, and an inpainting model without masks or with patches.

    Args:
        folder: the diffusers folder of the model.
        is_masked: whether the recipe has masks.
        is_placed: whether the recipe trains on patches.

    Raises:
        RecipeError: the model and the recipe do not fit.
    """
    problem = problem_of_masks(str(folder), is_masked=is_masked, is_placed=is_placed)
    if problem is not None:
        raise RecipeError(problem)


def _check_names(graph: LayerGraph, folder: Path) -> None:
    """Refuses adapters of layers for which ComfyUI has no name in an exported file. Raises ModelError."""
    targets = {name: layers for name, component in graph.components.items() if (layers := adapted_layers(component))}
    try:
        check_readable(str(model_index(folder)["_class_name"]), graph.components, targets)
    except ModelError as error:
        raise ModelError(f"lora.formats: {error}") from error


def _store(graph: LayerGraph, recipe: Recipe) -> None:
    """Replaces frozen linear layers of a graph by layers that store their weights in the recipe's form.

    Without such a form (nf4, int8, ...) it does nothing.

    Raises:
        RecipeError: a component in the recipe does not exist or has no frozen linear layer.
    """
    stated = recipe.model.frozen_dtype
    if stored_form(stated) is None:
        return
    for name in stated if isinstance(stated, dict) else ():
        if name not in graph.components:
            # Without the objective and its like, which have no parameters.
            known = ", ".join(key for key, one in graph.components.items() if any(True for _ in one.parameters()))
            raise RecipeError(f"model.frozen_dtype: the model has no component {name}; it has {known}")
    store(graph, partial(form_of, recipe), multiplies_integers=recipe.model.frozen_arithmetic is FrozenArithmetic.INT8)
    wanted = [name for name in graph.components if form_of(recipe, name) is not None]
    # A component that is named must have a layer to store; of one form for all, some component.
    if isinstance(stated, dict):
        empty = [name for name in wanted if not stored_layers(graph.components[name])]
    else:
        empty = wanted if not any(stored_layers(graph.components[name]) for name in wanted) else []
    if empty:
        raise RecipeError(
            f"model.frozen_dtype: {' and '.join(empty)} has no frozen linear layer to store; set lora.rank, so that "
            "its weights stay frozen, or leave it out"
        )


def _cast(graph: LayerGraph, recipe: Recipe) -> None:
    """Change the parameters of a graph on the meta device to the types that they will have when they are loaded.

    The description of the graph then has these types.
    """
    dtypes = {
        name: dtype
        for is_trained, dtype in ((False, frozen_dtype_of(recipe)), (True, trained_dtype(recipe)))
        if dtype is not None
        for name in factors(graph, is_trained=is_trained)
    }
    # Codes and scales, whose types belong to their form.
    as_stored = {name for key, one in graph.components.items() for name in parts_of(key, one)}
    for parameter, name in canonical_names(graph.components).items():
        if name not in as_stored:
            parameter.data = parameter.data.to(dtypes.get(name, parameter_dtype(recipe)))


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """The type of parameters, gradients and optimizer states: float64 for the precision of that name, else float32."""
    return torch.float64 if recipe.training.precision is RecipePrecision.FLOAT64 else torch.float32


def trained_dtype(recipe: Recipe) -> torch.dtype | None:
    """The type of trained weights: bfloat16 where the recipe keeps them in it, else None: as `parameter_dtype`."""
    return torch.bfloat16 if recipe.training.weights is KeptWeights.BFLOAT16 else None


def gradient_dtype_of(recipe: Recipe) -> torch.dtype:
    """The type in which gradients of trained weights in bfloat16 are summed, by `training.gradients`.

    For "auto" it is bfloat16 where a step is one micro-batch of one model on one pipeline, so that nothing is summed,
    and otherwise float32.
    """
    stated, pipeline = recipe.training.gradients, recipe.pipeline
    if stated is not Summed.AUTO:
        return torch.bfloat16 if stated is Summed.BFLOAT16 else torch.float32
    # A plan decides the micro-batches and the pipelines later.
    is_one = pipeline.plan is None and pipeline.microbatches == 1 and not pipeline.replicas and not recipe.models
    return torch.bfloat16 if is_one and pipeline.sizes.data_parallel == 1 else torch.float32


def rounding_of(recipe: Recipe) -> Rounding | None:
    """The way in which weights in bfloat16 are rounded after an update; None where no weights are in bfloat16."""
    training = recipe.training
    if trained_dtype(recipe) is None:
        return None
    return Rounding(training.seed, is_kahan=training.rounding is Rounded.KAHAN)


def autocast_of(recipe: Recipe) -> torch.dtype | None:
    """The dtype of torch.autocast: bfloat16 for the precision of that name; None: no autocast."""
    return torch.bfloat16 if recipe.training.precision is RecipePrecision.BFLOAT16 else None


def open_model(recipe: Recipe, job: Job) -> RecipeModels:
    """The models of a job's recipe on the meta device, with the precision that its devices have. Every rank calls it.

    Raises:
        ConfigError: a folder, the objective or another key is not one that can be trained.
    """
    chosen = decided_by_job(recipe, job)
    return on_all(lambda: build_model(chosen, job.device.type))


def sources_of(member: Member) -> dict[str, StoredWeights | None]:
    """The stored weights of a model's components, by the components' names in the graph of all models.

    Raises:
        ModelError: a component has no weights, or they cannot be read.
    """
    own = member.recipe.model
    found = weight_sources(member.folder, member.graph, variant=own.variant, from_scratch=own.from_scratch)
    return {member.component(name): stored for name, stored in found.items()}


def started_of(opened: RecipeModels) -> StartedAdapters:
    """The first values of adapters from the file that the recipe names in `lora.start`; no values without a file.

    Raises:
        ModelError: the file cannot be read, or its adapters do not fit.
    """
    lora, place = lora_of(opened.recipe), opened.recipe.lora.start
    if lora is None or place is None:
        return StartedAdapters()
    kind = str(model_index(opened.folder).get("_class_name"))
    return started_adapters(place, opened.graph, lora, pipeline=kind, resizes=opened.recipe.lora.resize)

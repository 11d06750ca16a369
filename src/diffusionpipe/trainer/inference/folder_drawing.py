"""Draws pictures from a diffusers folder in one process, as `sample` does; examples and tests compare with it."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.models.base.family import MOST_CHUNKS, WHOLE, CaptionReading, Clip, LowResolution
from diffusionpipe.models.base.self_conditioning import ESTIMATE
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.objectives.flow_shift import is_flow_scheduler
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import (
    build_graph,
    family_of,
    reads_coordinates,
    reads_estimate,
    scheduler_config,
    weight_sources,
)
from diffusionpipe.models.parameters.exported_layers import put_exported_layers, width_of
from diffusionpipe.models.parameters.lora_file import adapted_components, has_norms, load_adapters
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.models.parameters.narrow_weights import upcast_in_forward
from diffusionpipe.models.parameters.stored import missing_weights, stored_weights
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.job.agreement import rank_in
from diffusionpipe.trainer.data.survey import cut_prompts
from diffusionpipe.trainer.data.text.caption_lengths import readings_of
from diffusionpipe.trainer.inference.conditions import SampleRequest, raw_conditions, small_conditions, tokenizers_of
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.diffusers_pipeline import Order
from diffusionpipe.trainer.inference.drawing import MOVING, PLAIN, Arithmetic, Picture, decode, drawn, with_mask
from diffusionpipe.trainer.inference.fixed_batches import in_parts
from diffusionpipe.trainer.inference.known_pixels import with_known
from diffusionpipe.trainer.inference.parallel_in_time import ALONE, BlockRanks
from diffusionpipe.trainer.model.lora import form_in
from diffusionpipe.trainer.recipe.model_section import FrozenStore

logger = logging.getLogger(__name__)


class Predictor:
    """Predicts with a denoiser in one process, and keeps the last estimate for a denoiser that reads it."""

    def __init__(
        self, stage: LayerStage, conditions: Mapping[str, Tensor], arithmetic: Arithmetic, times: torch.dtype | None
    ) -> None:
        """Takes the denoiser's layers and their conditions, tensors by name with a row for each predicted row.

        `times`: the type of the times that the denoiser reads; None: as the scheduler gives them.
        """
        self._stage, self._conditions, self._arithmetic, self._times = stage, conditions, arithmetic, times
        self._estimate: Tensor | None = None

    def __call__(self, noisy: Tensor | None, timestep: Tensor) -> Tensor:
        """The prediction of the denoiser for each row of the noisy samples at a time step."""
        assert noisy is not None
        times = timestep.to(noisy.device, self._times or timestep.dtype).expand(len(noisy))
        inputs = {"noisy": noisy, "timesteps": times}
        if self.reads_estimate:
            # There is no estimate before the first step.
            last = torch.zeros_like(noisy) if self._estimate is None else self._estimate
            inputs[ESTIMATE] = torch.cat([last] * (len(noisy) // len(last)))  # once more for the rows without condition
        return self.predicted(inputs)

    def predicted(self, moving: Mapping[str, Tensor], rows: Tensor | None = None) -> Tensor:
        """The prediction of the denoiser for latents, times and estimates, which `moving` has by name.

        `rows`: the indices of their rows among all; None if they are all rows.
        """
        given = self._conditions if rows is None else {key: value[rows] for key, value in self._conditions.items()}
        with self._arithmetic.context(moving["noisy"].device):
            return in_parts(self._stage, {**moving, **given}, self._arithmetic.rows)["prediction"]

    @property
    def reads_estimate(self) -> bool:
        """Whether the denoiser reads its own estimate of the clean sample."""
        return ESTIMATE in self._stage.reads

    def remember(self, estimate: Tensor) -> None:
        """Keeps an estimate of the clean samples, which the denoiser reads at the next step in all rows of a sample."""
        self._estimate = estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A diffusers folder to draw from, with the size of its pictures, adapters, and the way it reads texts."""

    folder: Path
    resolution: int
    """The side of the pictures, in pixels."""
    adapters: Path | None = None
    """A folder with a file of adapters in diffusers' format, which are added to the components that it names; None
    without."""
    name: str = ""
    """The name of the model among several; "" for one model."""
    small: int | None = None
    """The side of the small pictures that the model reads; None if it reads none."""
    clip: Clip | None = None
    """The size of samples that are not square pictures of `resolution`; None for such pictures."""
    captions: CaptionReading = WHOLE
    """The way in which texts are read."""
    variant: str | None = None
    """The variant of the folder's weights that is read; see `stored_weights`."""
    frozen: FrozenStore = None
    """The form in which linear layers are stored, as a recipe's `frozen_dtype` states it."""

    @property
    def low(self) -> LowResolution | None:
        """The side of the small pictures that the model reads, with the largest noise; None if it reads none."""
        return None if self.small is None else LowResolution(resolution=self.small, augmentation=1.0)


def draw_from_folder(
    folder: Path,
    wish: SampleRequest,
    settings: SamplingSettings,
    *,
    resolution: int,
    device: torch.device,
    adapters: Path | None = None,
    clip: Clip | None = None,
    variant: str | None = None,
    captions: CaptionReading = WHOLE,
    arithmetic: Arithmetic = PLAIN,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Picture]:
    """The pictures or clips that one model in a diffusers folder draws in one process, as uint8 levels.

    Raises:
        ModelError: the folder is not one of a supported model, or the adapters are not of that model.
        RecipeError: prompts and labels do not suit the model.
    """
    source = Source(
        folder=folder, resolution=resolution, adapters=adapters, clip=clip, variant=variant, captions=captions
    )
    latents = latents_from_folder(source, wish, settings, device=device, arithmetic=arithmetic, on_step=on_step)
    return with_known(decode(folder, latents, variant), wish.known)


def latents_from_folder(
    source: Source,
    wish: SampleRequest,
    settings: SamplingSettings,
    small: Tensor | None = None,
    *,
    device: torch.device,
    arithmetic: Arithmetic = PLAIN,
    on_step: Callable[[int, int], None] | None = None,
    crew: BlockRanks = ALONE,
) -> Tensor:
    """The latents of the wished samples, drawn from a diffusers folder in one process.

    Where diffusers' pipeline draws, they are pictures with values in [0, 1].

    `small`: the small pictures that the model reads; None for other models. `crew`: this process and others that call
    it too, and share the steps if these are computed at the same time.

    Raises:
        ModelError: the folder is not one of a supported model, or the adapters are not of that model.
        RecipeError: prompts and labels do not suit the model.
    """
    opened = open_source(source, wish, settings, small)
    opened.store()
    predict = opened.predictor(device, arithmetic)
    return opened.latents(predict, settings, len(wish), device, on_step=on_step, crew=crew)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """A folder's model on the meta device, and the raw inputs of the samples that it is to draw."""

    source: Source
    """The folder, with the settings for drawing from it."""
    graph: LayerGraph
    """The graph of the model, on the meta device until layers are materialized."""
    raw: Mapping[str, Tensor]
    """The raw inputs of the conditions, by name."""
    frozen: tuple[Layer, ...]
    """The layers that make the conditions, such as text encoders."""
    trained: tuple[Layer, ...]
    """The layers of the denoiser, and of the ControlNet that steers it."""
    objective: ObjectiveSettings
    """The quantity that the denoiser predicts."""

    @property
    def denoiser(self) -> str:
        """The name of the denoiser's component."""
        return self.trained[-1].component

    def store(self) -> None:
        """Replaces linear layers by layers that store their weights in few bits, as `source.frozen` says.

        It is called before layers get their weights.
        """
        flags = [(p, p.requires_grad) for one in self.graph.components.values() for p in one.parameters()]
        for parameter, _ in flags:  # `store` replaces frozen layers only
            parameter.requires_grad_(False)
        store(self.graph, partial(form_in, self.source.frozen))
        for parameter, is_trained in flags:  # by which a description finds the layers of the denoiser
            parameter.requires_grad_(is_trained)

    def conditions(self, device: torch.device, arithmetic: Arithmetic) -> dict[str, Tensor]:
        """The tensors by name that the denoiser reads beside latents and times, each with the rows of the raw inputs.

        The encoders get their weights for this, and lose them at the end.
        """
        self.materialize(self.frozen, device, arithmetic)
        fed = {name for layer in self.trained for name in layer.reads} - set(MOVING)
        with torch.no_grad(), arithmetic.context(device):
            on_device = {name: value.to(device) for name, value in self.raw.items()}
            found = on_device | run_layers(self.frozen, self.graph.components, on_device, targets=fed)
        for name in {layer.component for layer in self.frozen}:
            self.graph.components[name].to("meta")  # the encoders' memory is free for the denoiser
        return found

    def materialize(self, layers: Collection[Layer], device: torch.device, arithmetic: Arithmetic) -> None:
        """Gives the layers their weights on the device, with adapters, in the fewest bytes that give the same bits.

        With bfloat16, factors of matrix products are stored as autocast reads them; with float32 they keep the folder's
        type if it is narrower.

        Raises:
            ModelError: a weight is missing, or the adapters are not of that model.
        """
        for component in self.graph.components.values():
            component.requires_grad_(False)  # nothing is trained, and frozen factors may be as autocast reads them
        names, adapters = [layer.name for layer in layers], self.source.adapters
        # DoRA reads the norms of weights outside autocast.
        narrow = None if adapters is not None and has_norms(adapters) else arithmetic.narrow
        sources = weight_sources(self.source.folder, self.graph, variant=self.source.variant)
        materialize(
            self.graph,
            names,
            sources,
            device=device,
            dtype=torch.float32,
            seed=0,
            frozen_dtype=narrow,
            keeps_narrow=arithmetic.narrow is None,
        )
        if adapters is not None:
            for adapted in self._adapted(adapters) & {layer.component for layer in layers}:
                load_adapters(self.graph.components[adapted], adapters, adapted)

    def predictor(self, device: torch.device, arithmetic: Arithmetic, kind: type[Predictor] = Predictor) -> Predictor:
        """The denoiser on the device, with its weights and the conditions of the samples, as a predictor.

        `kind`: the class of the predictor.

        Raises:
            ModelError: a weight is missing, or the adapters are not of that model.
        """
        conditions = self.conditions(device, arithmetic)
        self.materialize(self.trained, device, arithmetic)
        stage = LayerStage(self.trained, self.graph.components, outputs=["prediction"])
        fed = {name: conditions[name] for name in stage.reads if name not in MOVING}
        times = torch.float32 if self.objective.prediction is Prediction.FLOW_MATCHING else None
        return kind(stage, fed, arithmetic, times)

    def latents(
        self,
        predict: Predictor,
        settings: SamplingSettings,
        num_samples: int,
        device: torch.device,
        *,
        on_step: Callable[[int, int], None] | None = None,
        crew: BlockRanks = ALONE,
    ) -> Tensor:
        """The latents of `num_samples` samples, or pictures with values in [0, 1] where diffusers' pipeline draws.

        The denoiser's weights are freed at the end.
        """
        remember = predict.remember if predict.reads_estimate else None
        order = self.order(settings, num_samples, device)
        with torch.no_grad():
            found = drawn(
                order, predict, self.graph, model=self.source.name, feed_back=remember, on_step=on_step, crew=crew
            )
        assert found is not None
        return found

    def _adapted(self, folder: Path) -> set[str]:
        """The names of the components that have adapters in a folder's file.

        Raises:
            ModelError: it has adapters of components that this model lacks, or none.
        """
        found = set(adapted_components(folder))
        if not found or not found <= self.graph.components.keys():
            raise ModelError(
                f"{folder / ADAPTERS} holds adapters of {', '.join(sorted(found)) or 'nothing'}, not of "
                f"{self.denoiser}; it belongs to another kind of model"
            )
        return found

    def order(self, settings: SamplingSettings, num_samples: int, device: torch.device) -> Order:
        """The number, size and settings of the samples to draw, as an order for `drawn`."""
        return Order(
            folder=self.source.folder,
            variant=self.source.variant,
            settings=settings,
            num_samples=num_samples,
            latents=next(spec.shape for spec in self.graph.inputs if spec.name == "noise"),
            resolution=self.source.resolution,
            clip=self.source.clip,
            device=device,
            release=self.release,
        )

    def release(self) -> None:
        """Frees the weights of the denoiser, by moving it to the meta device."""
        for name in {layer.component for layer in self.trained}:
            self.graph.components[name].to("meta")


def open_source(
    source: Source, wish: SampleRequest, settings: SamplingSettings, small: Tensor | None = None, *, tells: bool = True
) -> OpenedSource:
    """A folder's model on the meta device, with the raw inputs of the wished samples.

    `small`: the small pictures that the model reads; None for other models. `tells`: rank 0 warns of prompts that are
    longer than the text encoders read.

    Raises:
        ModelError: the folder is not one of a supported model.
        RecipeError: prompts and labels do not suit the model.
    """
    folder, graph = source.folder, graph_of(source)
    graph = replace(graph, layers=tuple(upcast_in_forward(layer) for layer in graph.layers))
    raw = with_mask(raw_conditions(wish, graph, folder, settings))
    if tells and rank_in() == 0:
        texts = list(dict.fromkeys((*wish.prompts, *wish.negatives)))
        can_read_more = family_of(folder).has_chunks and source.captions.chunks < MOST_CHUNKS
        remedy = "more --caption-chunks read more of it" if can_read_more else ""
        readings = readings_of(graph.inputs, tokenizers_of(graph, folder)) if texts else ()
        for text in cut_prompts(texts, readings, remedy=remedy):
            logger.warning("%s%s", f"{source.name}: " if source.name else "", text)
    if small is not None:
        raw |= small_conditions(small, graph, folder, settings, source.name)
    (backbone,) = graph.backbones
    assert backbone.prediction is not None, "supported pipelines can be sampled from"
    layers = needed_layers(graph.layers, (backbone.prediction,), given=(*MOVING, *raw))
    moving = set(MOVING)
    denoisers = set()
    for layer in layers:
        # The denoiser is each component that sees latents or times, also by way of others; its other layers belong to
        # it too.
        if not moving.isdisjoint(layer.reads):
            denoisers.add(layer.component)
            moving.update(layer.writes)
    return OpenedSource(
        source=source,
        graph=graph,
        raw=raw,
        frozen=tuple(layer for layer in layers if layer.component not in denoisers),
        trained=tuple(layer for layer in layers if layer.component in denoisers),
        objective=_objective_of(folder),
    )


def graph_of(source: Source) -> LayerGraph:
    """The layer graph of a folder's model on the meta device, built for the size of the samples to draw.

    Raises:
        ModelError: the folder is not one of a supported model, or a narrow export is given adapters.
    """
    graph = build_graph(
        source.folder,
        objective=_objective_of(source.folder),
        resolution=source.resolution,
        low=source.low,
        clip=source.clip,
        captions=source.captions,
        is_drawn=True,
        is_placed=reads_coordinates(source.folder),
    )
    _put_exported(source, graph)
    return graph


def _put_exported(source: Source, graph: LayerGraph) -> None:
    """Replaces the layers that a narrow export stores in few bits, if the folder is such an export.

    Raises:
        ModelError: there are adapters, which belong to the wide model, or a file cannot be read.
    """
    for name in family_of(source.folder).components:
        path = source.folder / name / "config.json"
        config: Any = read_json(path)
        width = width_of(config, path)
        if width is None:
            continue
        if source.adapters is not None:
            raise ModelError(
                f"{source.folder} is a narrow export ({name} in {width}), which takes no adapters; add them to the "
                "wide model (lora.merge = true) and export that"
            )
        found = stored_weights(source.folder / name, source.variant)
        if found is None:
            raise ModelError(missing_weights(source.folder / name, "and they are needed here; get the model again"))
        put_exported_layers(graph, name, width, found)


def _objective_of(folder: Path) -> ObjectiveSettings:
    """The quantity that the folder's denoiser predicts, and whether it reads its own estimate."""
    config = scheduler_config(folder)
    kind = Prediction.V_PREDICTION if config.get("prediction_type") == "v_prediction" else Prediction.EPSILON
    if is_flow_scheduler(config):
        kind = Prediction.FLOW_MATCHING
    return ObjectiveSettings(prediction=kind, self_conditioning=float(reads_estimate(folder)))

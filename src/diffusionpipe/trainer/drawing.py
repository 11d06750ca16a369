"""Pictures from prompts or labels: conditions in, denoised latents, decoded pictures out.

Either through the pipeline that trains (`latents_in_session`), or in one process from a diffusers folder
(`draw_from_folder`). `cascade_drawing` draws with several models, each of which enlarges what the one before has drawn.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionpipe.models.family import LowResolution
from diffusionpipe.models.flow_shift import is_flow_scheduler
from diffusionpipe.models.folder import build_graph, family_of, reads_estimate, scheduler_config, weight_sources
from diffusionpipe.models.graph import Layer, LayerGraph
from diffusionpipe.models.lora_file import load_adapters
from diffusionpipe.models.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.run import needed_layers, run_layers
from diffusionpipe.models.self_conditioning import CONDITIONED, ESTIMATE
from diffusionpipe.models.weights import materialize
from diffusionpipe.runtime.error_file import is_shortage
from diffusionpipe.runtime.host_weights import HostWeights
from diffusionpipe.runtime.stage import LayerStage
from diffusionpipe.trainer.conditions import Wish, raw_conditions, small_conditions
from diffusionpipe.trainer.recipe import Precision
from diffusionpipe.trainer.sampling import PipelinePredictor, SamplingSettings, Spacing, draw
from diffusionpipe.trainer.stand_in import Order, draw_by_pipeline

if TYPE_CHECKING:
    from diffusionpipe.trainer.members import Member
    from diffusionpipe.trainer.session import Session

_MOVING = ("noisy", "timesteps", ESTIMATE)
"""What changes from one denoising step to the next."""

Picture = NDArray[np.uint8]
"""(H, W, 3)."""

logger = logging.getLogger(__name__)


def decode(folder: Path, latents: Tensor) -> list[Picture]:
    """Pictures of latents through the folder's own VAE; diffusers' own pipelines have decoded theirs already."""
    return in_levels(latents if family_of(folder).call is not None else decode_exactly(folder, latents))


def decoded_if_possible(folder: Path, latents: Tensor) -> list[Picture] | None:
    """The pictures; None where this rank has no memory for them. The others wait for none of it and train on."""
    try:
        return decode(folder, latents)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        logger.warning(
            'samples=none reason="no memory to decode them: %s" remedy="use a smaller data.resolution or '
            'leave more memory free"; training continues',
            str(error).splitlines()[0] if str(error) else "MemoryError",
        )
        return None
    finally:
        if latents.is_cuda:
            torch.cuda.empty_cache()


def in_levels(values: Tensor) -> list[Picture]:
    """Pictures of 256 levels from values in [0, 1], (N, H, W, 3)."""
    return [picture.numpy() for picture in (values * 255).round().byte()]


def decode_exactly(folder: Path, latents: Tensor) -> Tensor:
    """The same pictures with values in [0, 1], before they are rounded to 256 levels, (N, H, W, 3) on the CPU.

    Latents of a model without a VAE are the pictures themselves.
    """
    from diffusers import AutoencoderKL

    if "vae" not in family_of(folder).components:
        pictures = (latents.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu()
        return pictures.expand(-1, -1, -1, 3)
    vae = AutoencoderKL.from_pretrained(folder / "vae", use_safetensors=True).to(latents.device).eval()
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    decoded_parts = []
    with torch.no_grad():
        for chunk in latents.float().split(1):  # a picture of 1024 x 1024 takes gigabytes
            decoded = vae.decode(chunk / vae.config.scaling_factor + shift, return_dict=False)[0]  # (n, 3, H, W)
            decoded_parts.append((decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu())
    return torch.cat(decoded_parts)


def latents_in_session(
    session: "Session",
    member: "Member",
    wish: Wish,
    settings: SamplingSettings,
    small: Tensor | None = None,
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor | None:
    """Latents of one of the session's models on the ranks that hold them; None on others, and in groups that draw none.

    `small`: the small pictures that the model reads. `on_step` is told the denoising steps done and all of them.

    The first pipeline draws; the other data-parallel groups have nothing to do but where they share its parameters, so
    that they are gathered together: then all draw the same.
    """
    worker = session.worker
    if worker.place.group != 0 and session.plan.mesh.shard == 1:
        return None
    backbone = next(one for one in session.model.backbones if one.name == member.name)
    raw = _with_mask(raw_conditions(wish, member.graph, member.folder, settings))
    if small is not None:
        raw |= small_conditions(small, member.graph, member.folder, settings, member.name)
    raw = {member.component(name): value for name, value in raw.items()}
    num_rows = len(next(iter(raw.values())))
    moving = [name for name in (backbone.noisy, backbone.timesteps, backbone.estimate) if name is not None]
    fed = [name for name in worker.sample(backbone.name).store if name not in moving]
    precision = session.recipe.training.precision
    autocast = torch.autocast(
        session.job.device.type, dtype=torch.bfloat16, enabled=precision is Precision.BFLOAT16, cache_enabled=False
    )
    with torch.no_grad(), autocast:
        on_device = {name: value.to(session.job.device) for name, value in raw.items()}
        frozen = _frozen_part(session.graph, fed, on_device, moving, worker.host_weights)

    def lead(changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad(), autocast:
            return run_layers(frozen.lead, session.graph.components, {**frozen.tensors, **changed}, targets=frozen.led)

    predict = PipelinePredictor(
        worker,
        session.transport,
        backbone,
        conditions={name: value for name, value in frozen.tensors.items() if name in fed},
        num_rows=num_rows,
        device=session.job.device,
        lead=lead if frozen.lead else None,
        is_everywhere=family_of(member.folder).call is not None,
    )
    order = Order(
        folder=member.folder,
        settings=settings,
        num_samples=len(wish),
        latents=session.model.tensor(backbone.noisy).shape,
        resolution=member.recipe.data.resolution,
        device=session.job.device,
    )
    if family_of(member.folder).call is not None:
        is_shown = worker.place.group == 0 and predict.shows
        return draw_by_pipeline(order, predict, decodes=is_shown, on_step=on_step)
    return draw(
        predict,
        settings,
        num_samples=order.num_samples,
        latent_shape=order.latents,
        holds_latents=predict.holds_latents,
        spacing=spacing_of(member.graph),
        feed_back=partial(_remembered, member.graph, predict.remember) if predict.reads_estimate else None,
        device=order.device,
        model=member.name,
        on_step=on_step,
    )


def _with_mask(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The raw inputs of conditions, with the mask of a denoiser that reads its own estimate: all rows do."""
    return {**raw, CONDITIONED: torch.ones(len(next(iter(raw.values()))))}


def _remembered(
    graph: LayerGraph, remember: Callable[[Tensor], None], prediction: Tensor, noisy: Tensor, timestep: Tensor
) -> None:
    """`FeedBack` of a denoiser that reads its own estimate: that of a guided prediction."""
    objective = graph.components["objective"]
    assert isinstance(objective, Objective)
    times = timestep.to(noisy.device).expand(len(noisy))
    remember(objective.estimate(prediction, noisy, times))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frozen:
    """What frozen layers do for a rank's stages while samples are drawn."""

    tensors: Mapping[str, Tensor]
    """Conditions: the same at every time step."""
    lead: tuple[Layer, ...]
    """Layers of the denoiser that see latents or times, to be run at every time step; more than none with adapters."""
    led: frozenset[str]
    """What the stages read of those."""


def _frozen_part(
    graph: LayerGraph,
    names: Collection[str],
    raw: Mapping[str, Tensor],
    changing: Collection[str],
    weights: HostWeights | None,
) -> _Frozen:
    """The tensors of these names that raw inputs give, and the layers that make the others of latents and times.

    `changing`: latents and times, which change from one denoising step to the next. `weights`: brings the layers'
    weights to the device, if they rest in host memory.
    """
    layers = needed_layers(graph.layers, names, given=(*raw, *changing))
    moving = set(changing)
    lead, before = [], []
    for layer in layers:
        if moving.isdisjoint(layer.reads):
            before.append(layer)
        else:
            lead.append(layer)
            moving.update(layer.writes)
    if weights is not None:
        before, lead = list(weights.brought(before)), list(weights.brought(lead))
    wanted = {*names, *(name for layer in lead for name in layer.reads)} - moving
    return _Frozen(
        tensors=dict(raw) | run_layers(before, graph.components, dict(raw), targets=wanted),
        lead=tuple(lead),
        led=frozenset(moving.intersection(names)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How rows go through the denoiser; the same pictures bit for bit need the same."""

    rows: int | None = None
    """Rows at a time, the last ones filled up; None: all."""
    precision: Precision = Precision.FLOAT32

    def context(self, device: torch.device) -> torch.autocast:
        """Autocast for layers, where they compute in bfloat16."""
        is_narrow = self.precision is Precision.BFLOAT16
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_narrow, cache_enabled=False)


def _in_passes(stage: LayerStage, inputs: Mapping[str, Tensor], arithmetic: Arithmetic) -> Tensor:
    """The prediction for all rows, so many at a time as the arithmetic says."""
    num_rows = len(inputs["noisy"])
    size = arithmetic.rows or num_rows
    outputs = []
    for start in range(0, num_rows, size):
        part = {name: value[start : start + size] for name, value in inputs.items()}
        missing = size - len(part["noisy"])
        if missing:
            part = {
                name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) for name, value in part.items()
            }
        with arithmetic.context(inputs["noisy"].device):
            outputs.append(stage(part)["prediction"])
    return torch.cat(outputs)[:num_rows]


class _Predictor:
    """Predicts in one process. Mutable: it keeps the last estimate for a denoiser that reads it."""

    def __init__(
        self, stage: LayerStage, conditions: Mapping[str, Tensor], arithmetic: Arithmetic, times: torch.dtype | None
    ) -> None:
        """`times`: of the times that the stage reads; None: as the scheduler gives them."""
        self._stage, self._conditions, self._arithmetic, self._times = stage, conditions, arithmetic, times
        self._estimate: Tensor | None = None

    def __call__(self, noisy: Tensor | None, timestep: Tensor) -> Tensor:
        """See `sampling.Predict`."""
        assert noisy is not None
        times = timestep.to(noisy.device, self._times or timestep.dtype).expand(len(noisy))
        inputs = {"noisy": noisy, "timesteps": times, **self._conditions}
        if ESTIMATE in self._stage.reads:
            last = torch.zeros_like(noisy) if self._estimate is None else self._estimate
            inputs[ESTIMATE] = torch.cat([last] * (len(noisy) // len(last)))
        return _in_passes(self._stage, inputs, self._arithmetic)

    def remember(self, estimate: Tensor) -> None:
        """Let the next step read this estimate, the same for every row of a sample."""
        self._estimate = estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A diffusers folder that is drawn from, in one process."""

    folder: Path
    resolution: int
    """Side of the pictures, in pixels."""
    adapters: Path | None = None
    """A folder with the file of adapters that diffusers writes, to be added to the denoiser."""
    name: str = ""
    """Of the model among several."""
    small: int | None = None
    """Side of the small pictures that it reads; None: it reads none."""

    @property
    def low(self) -> LowResolution | None:
        """The small pictures that it reads."""
        return None if self.small is None else LowResolution(resolution=self.small, augmentation=1.0)


def draw_from_folder(
    folder: Path,
    wish: Wish,
    settings: SamplingSettings,
    *,
    resolution: int,
    device: torch.device,
    adapters: Path | None = None,
    arithmetic: Arithmetic = Arithmetic(),
    on_step: Callable[[int, int], None] | None = None,
) -> list[Picture]:
    """Pictures of one model, else as `latents_from_folder`."""
    source = Source(folder=folder, resolution=resolution, adapters=adapters)
    latents = latents_from_folder(source, wish, settings, device=device, arithmetic=arithmetic, on_step=on_step)
    return decode(folder, latents)


def latents_from_folder(
    source: Source,
    wish: Wish,
    settings: SamplingSettings,
    small: Tensor | None = None,
    *,
    device: torch.device,
    arithmetic: Arithmetic = Arithmetic(),
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Latents of pictures from a diffusers folder in one process, also of a U-Net trained by flow matching.

    `small`: the small pictures that the model reads.

    Raises:
        ModelError: the folder is not one of a supported model, or the adapters are not of that model.
        RecipeError: prompts and labels do not suit the model.
    """
    folder = source.folder
    objective = _objective_of(folder)
    graph = build_graph(folder, objective=objective, resolution=source.resolution, low=source.low)
    raw = _with_mask(raw_conditions(wish, graph, folder, settings))
    if small is not None:
        raw |= small_conditions(small, graph, folder, settings, source.name)
    (backbone,) = graph.backbones
    assert backbone.prediction is not None, "supported pipelines can be sampled from"
    layers = needed_layers(graph.layers, (backbone.prediction,), given=(*_MOVING, *raw))
    names = [layer.name for layer in layers]
    materialize(graph, names, weight_sources(folder, graph), device=device, dtype=torch.float32, seed=0)
    denoiser = next(layer.component for layer in layers if backbone.prediction in layer.writes)
    if source.adapters is not None:
        load_adapters(graph.components[denoiser], source.adapters, denoiser)
    frozen = [layer for layer in layers if layer.component != denoiser]
    trained = [layer for layer in layers if layer.component == denoiser]
    stage = LayerStage(trained, graph.components, outputs=["prediction"])
    fed = [name for name in stage.reads if name not in _MOVING]
    with torch.no_grad():
        on_device = {name: value.to(device) for name, value in raw.items()}
        with arithmetic.context(device):
            conditions = on_device | run_layers(frozen, graph.components, on_device, targets=set(fed))

        times = torch.float32 if objective.prediction is Prediction.FLOW_MATCHING else None
        predict = _Predictor(stage, {name: conditions[name] for name in fed}, arithmetic, times)
        order = Order(
            folder=folder,
            settings=settings,
            num_samples=len(wish),
            latents=_latent_shape(graph),
            resolution=source.resolution,
            device=device,
        )
        if family_of(folder).call is not None:
            drawn = draw_by_pipeline(order, predict, decodes=True, on_step=on_step)
        else:
            drawn = draw(
                predict,
                settings,
                num_samples=order.num_samples,
                latent_shape=order.latents,
                spacing=spacing_of(graph),
                feed_back=partial(_remembered, graph, predict.remember) if ESTIMATE in stage.reads else None,
                device=device,
                model=source.name,
                on_step=on_step,
            )
    assert drawn is not None
    return drawn


def _objective_of(folder: Path) -> ObjectiveSettings:
    """What the folder's denoiser predicts, and whether it reads its own estimate."""
    config = scheduler_config(folder)
    kind = Prediction.V_PREDICTION if config.get("prediction_type") == "v_prediction" else Prediction.EPSILON
    if is_flow_scheduler(config):
        kind = Prediction.FLOW_MATCHING
    return ObjectiveSettings(prediction=kind, self_conditioning=float(reads_estimate(folder)))


def spacing_of(graph: LayerGraph) -> Spacing:
    """How time steps are spaced for this model."""
    return Spacing(num_tokens=graph.num_tokens, has_even_sigmas=graph.has_even_sigmas)


def _latent_shape(graph: LayerGraph) -> tuple[int, ...]:
    return next(spec.shape for spec in graph.inputs if spec.name == "noise")

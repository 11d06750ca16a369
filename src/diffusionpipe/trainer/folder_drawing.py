"""Pictures from a diffusers folder, in one process: what `sample` draws, and what examples and tests compare with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffusionpipe.models.family import LowResolution
from diffusionpipe.models.flow_shift import is_flow_scheduler
from diffusionpipe.models.folder import build_graph, reads_estimate, scheduler_config, weight_sources
from diffusionpipe.models.graph import LayerGraph
from diffusionpipe.models.lora_file import load_adapters
from diffusionpipe.models.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.run import needed_layers, run_layers
from diffusionpipe.models.self_conditioning import ESTIMATE
from diffusionpipe.models.weights import materialize
from diffusionpipe.runtime.stage import LayerStage
from diffusionpipe.trainer.conditions import Wish, raw_conditions, small_conditions
from diffusionpipe.trainer.drawing import MOVING, PLAIN, Arithmetic, Picture, decode, drawn, with_mask
from diffusionpipe.trainer.sampling import SamplingSettings
from diffusionpipe.trainer.stand_in import Order


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
    arithmetic: Arithmetic = PLAIN,
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
    arithmetic: Arithmetic = PLAIN,
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
    raw = with_mask(raw_conditions(wish, graph, folder, settings))
    if small is not None:
        raw |= small_conditions(small, graph, folder, settings, source.name)
    (backbone,) = graph.backbones
    assert backbone.prediction is not None, "supported pipelines can be sampled from"
    layers = needed_layers(graph.layers, (backbone.prediction,), given=(*MOVING, *raw))
    names = [layer.name for layer in layers]
    materialize(graph, names, weight_sources(folder, graph), device=device, dtype=torch.float32, seed=0)
    denoiser = next(layer.component for layer in layers if backbone.prediction in layer.writes)
    if source.adapters is not None:
        load_adapters(graph.components[denoiser], source.adapters, denoiser)
    frozen = [layer for layer in layers if layer.component != denoiser]
    trained = [layer for layer in layers if layer.component == denoiser]
    stage = LayerStage(trained, graph.components, outputs=["prediction"])
    fed = [name for name in stage.reads if name not in MOVING]
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
        remember = predict.remember if ESTIMATE in stage.reads else None
        latents = drawn(order, predict, graph, model=source.name, feed_back=remember, on_step=on_step)
    assert latents is not None
    return latents


def _objective_of(folder: Path) -> ObjectiveSettings:
    """What the folder's denoiser predicts, and whether it reads its own estimate."""
    config = scheduler_config(folder)
    kind = Prediction.V_PREDICTION if config.get("prediction_type") == "v_prediction" else Prediction.EPSILON
    if is_flow_scheduler(config):
        kind = Prediction.FLOW_MATCHING
    return ObjectiveSettings(prediction=kind, self_conditioning=float(reads_estimate(folder)))


def _latent_shape(graph: LayerGraph) -> tuple[int, ...]:
    return next(spec.shape for spec in graph.inputs if spec.name == "noise")

"""Predicts the time and memory of `diffusionpipe sample --ranks` on a cluster from a profile, without weights.

    every rank     encoders, gone ─┐
    worker 0       stage 0         └─> F0 F1 F2 ... | F0 F1 F2 ... | ...       a step of denoising is a forward of all
    worker 1       stage 1                F0 F1 ... |    F0 F1 ... | ...       micro-batches; the next waits for its end
    worker 0       stage 0, gone ──> decoder

Weights that are factors of products are stored in two bytes where the profile computes in bfloat16, as `sample` stores
them. The first rank decodes the pictures, when its weights are gone: one after the other, each whole or, where that
does not fit, tile by tile. The time of that and the scheduler's own arithmetic are in no profile and are left out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from diffusionpipe.costs import LayerSpec, ModelGraph, ParameterSpec, Profile
from diffusionpipe.costs.graph import BYTES_OF_STORED, scales_of, upstream
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.memory import forward_bytes
from diffusionpipe.ir import Plan
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.drawing.forwards import forward_time, forward_uses
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import frozen_time
from diffusionpipe.units import Bytes, Seconds

_NARROW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingMemory:
    """The bytes of one rank while pictures are drawn: it holds first encoders, then its stage, then the decoder."""

    encoders: Bytes
    """Bytes of the encoders' weights, the tensors between their layers, and the workspace of their hungriest layer."""
    weights: Bytes
    """Weights of the rank's stage."""
    tensors: Bytes
    """Tensors that the stage reads from outside for all rows, tensors between its layers, the workspace of its
    hungriest layer, and messages."""
    decoding: Bytes = 0
    """Bytes of the VAE, the latents, and the tensors that its decoder makes; 0 on ranks that decode nothing."""

    @property
    def peak(self) -> Bytes:
        """The most bytes at a time: of the encoders, of the stage with its tensors, or of the decoder."""
        return max(self.encoders, self.weights + self.tensors, self.decoding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The predicted times and memory of pictures that are drawn together over all devices of a cluster."""

    pictures: int
    """The number of pictures."""
    rows: int
    """Rows that pass through the denoiser in each step: two for each picture with classifier-free guidance."""
    encoding: Seconds
    """Time in which all texts are encoded, on each rank."""
    step: Seconds
    """Time of one step of denoising, in seconds."""
    memory: tuple[DrawingMemory, ...]
    """The memory of each rank while pictures are drawn, by rank."""
    is_decoding_known: bool
    """Whether the profile has the memory of decoding."""
    is_tiled: bool = False
    """Whether pictures are decoded tile by tile, because a whole one does not fit."""

    def latency(self, steps: int) -> Seconds:
        """The seconds until the latents of all pictures are there, after `steps` steps of denoising."""
        return self.encoding + steps * self.step

    def seconds_a_picture(self, steps: int) -> Seconds:
        """The seconds of `latency`, divided by the number of pictures."""
        return self.latency(steps) / self.pictures


def drawing_plan(model: ModelGraph, ranks: int, rows: int, size: int) -> Plan:
    """The plan of a pipeline over `ranks` ranks that draws `rows` rows, in micro-batches of `size` rows.

    Its training schedule is a placeholder for a batch of one sample.
    """
    layout = Layout(batch=1, stages=ranks, microbatches=1, schedule="gpipe", sample_batch=rows, sample_microbatch=size)
    return build_plan(model, layout)


def predict_drawing(setting: Setting, *, pictures: int, rows: int, size: int) -> Drawing:
    """The time and the memory of drawing over all devices of the cluster, in micro-batches of `size` rows.

    `rows`: the rows of all pictures, two for each with classifier-free guidance.

    Raises:
        ConfigError: there are more devices than layers, or several models that draw in turn, or no prediction.
    """
    graph, cluster = setting.graph, setting.cluster
    if len(graph.backbones) > 1:
        raise ConfigError(
            "the profile has several models, which draw one after the other; give a profile of each alone"
        )
    (backbone,) = graph.backbones
    if not upstream(graph.layers, backbone.result) or backbone.prediction is None:
        raise ConfigError("the model of this profile cannot be drawn from: it has no prediction")
    if cluster.num_ranks > len(graph.backbone_layers):
        raise ConfigError(
            f"{cluster.num_ranks} ranks cannot share the {len(graph.backbone_layers)} layers of the denoiser; use a "
            f"cluster with {len(graph.backbone_layers)} devices at most"
        )
    plan = drawing_plan(graph, cluster.num_ranks, rows, size)
    (schedule,) = plan.sample
    uses = forward_uses(setting.profile, schedule, plan.blocks, {layer.name for layer in _drawn(graph)})
    encoders = _encoders(graph)
    slowest = min(device.speed for device in cluster.devices)
    decoder, is_tiled = decoder_use(setting.profile, pictures, cluster.devices[0].memory)
    held = _bytes_of_encoders(setting.profile, encoders, rows)
    return Drawing(
        pictures=pictures,
        rows=rows,
        encoding=frozen_time(setting.profile, encoders, rows) / slowest,
        step=forward_time(setting, schedule, plan.blocks, plan.mesh),
        memory=tuple(
            DrawingMemory(
                encoders=held,
                weights=_weights(setting.profile, use.layers),
                tensors=use.read + use.running,
                decoding=decoder if worker == 0 else 0,
            )
            for worker, use in enumerate(uses)
        ),
        is_decoding_known=setting.profile.decoding is not None,
        is_tiled=is_tiled,
    )


def decoder_use(profile: Profile, pictures: int, room: Bytes) -> tuple[Bytes, bool]:
    """(bytes of the VAE while it decodes the pictures, whether it decodes by tiles); (0, False) if not in the profile.

    It decodes by tiles if whole pictures need more than `room` bytes. Decoded pictures wait in host memory; on a CPU
    they count too.
    """
    decoding, on_host = profile.decoding, profile.device_type == "cpu"
    if decoding is None:
        return 0, False
    is_tiled = decoding.needs_tiles(room, pictures, on_host=on_host)
    return decoding.peak(pictures, is_tiled=is_tiled, on_host=on_host), is_tiled


def _drawn(graph: ModelGraph) -> list[LayerSpec]:
    """The layers of the denoiser and of a ControlNet: of all components that read noisy latents or times."""
    (backbone,) = graph.backbones
    moving = {name for name in (backbone.noisy, backbone.timesteps, backbone.estimate) if name is not None}
    # From the noisy samples on: layers that make them are of training alone.
    layers = [layer for layer in upstream(graph.layers, backbone.result) if moving.isdisjoint(layer.writes)]
    components = set()
    for layer in layers:
        if not moving.isdisjoint(layer.reads):
            components.add(layer.component)
            moving.update(layer.writes)
    return [layer for layer in layers if layer.component in components]


def _encoders(graph: ModelGraph) -> list[str]:
    """The names of the layers that make the tensors that the denoiser reads beside noisy latents and times."""
    (backbone,) = graph.backbones
    drawn = _drawn(graph)
    others = [layer for layer in graph.layers if layer not in drawn]
    wanted = {name for layer in drawn for name in layer.reads} - {backbone.noisy, backbone.timesteps}
    found = {layer.name for name in wanted for layer in upstream(others, name)}
    return [layer.name for layer in others if layer.name in found]


def _bytes_of_encoders(profile: Profile, layers: Sequence[str], rows: int) -> Bytes:
    if not layers:
        return 0
    return _weights(profile, layers) + forward_bytes(profile, layers, rows)


def _weights(profile: Profile, layers: Collection[str]) -> Bytes:
    names = profile.graph.parameters_of(layers)
    own = [one for one in profile.graph.parameters if one.name in names]
    scales = scales_of(own)
    return sum(one.num_bytes if one.name in scales else _in_use(one, profile.precision) for one in own)


def _in_use(parameter: ParameterSpec, precision: str) -> Bytes:
    is_factor = len(parameter.shape) > 1 and parameter.dtype not in BYTES_OF_STORED
    return prod(parameter.shape) * _NARROW if is_factor and precision == "bfloat16" else parameter.num_bytes

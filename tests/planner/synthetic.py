"""Profiles of made-up models in the shape and size of real ones, and clusters for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from diffusionpipe.costs import (
    AllReduce,
    Cluster,
    Device,
    LayerProfile,
    LayerSpec,
    Link,
    ModelGraph,
    PairLink,
    ParameterSpec,
    Profile,
    TensorSpec,
)
from diffusionpipe.holding import DEVICE, Storage, Workload, plain_states
from diffusionpipe.planner.pricing.setting import Setting

GB = 10**9
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Sketch:
    """A model being written down, layer by layer."""

    inputs: tuple[str, ...] = ("pixels", "tokens")
    layers: list[LayerSpec] = field(default_factory=list)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    parameters: list[ParameterSpec] = field(default_factory=list)
    times: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds a sample: forward, input gradient, weight gradient."""
    activation: list[int] = field(default_factory=list)

    def tensor(self, name: str, elements: int, *, grad: bool = False, dtype: str = "float16") -> str:
        self.tensors[name] = TensorSpec(name=name, shape=(elements,), dtype=dtype, needs_gradient=grad)
        return name

    def layer(self, name, component, reads, writes, *, seconds, parameters=0, trained=True, kept=1.0, input_grad=True):
        """`kept`: bytes kept besides the tensors written, in units of the first of them."""
        names = ()
        if parameters:
            names = (f"{name}.weight",)
            dtype = "float32" if trained else "float16"
            spec = ParameterSpec(name=names[0], shape=(parameters,), dtype=dtype, is_trainable=trained)
            self.parameters.append(spec)
        self.layers.append(
            LayerSpec(name=name, component=component, reads=tuple(reads), writes=tuple(writes), parameters=names,
                      flops=round(seconds * 1e14))
        )  # fmt: skip
        is_backbone = component in ("unet", "transformer", "objective")
        has_grad = is_backbone and input_grad
        self.times.append((seconds, seconds if has_grad else 0.0, seconds if trained and parameters else 0.0))
        written = sum(self.tensors[n].num_bytes for n in writes)
        self.activation.append(written + round(kept * self.tensors[writes[0]].num_bytes))

    def profile(self, *, overhead: float = 5e-5, sizes: Sequence[int] = BATCH_SIZES) -> Profile:
        """`overhead`: seconds of each pass besides those in proportion to the samples."""
        graph = ModelGraph(
            layers=tuple(self.layers),
            tensors=tuple(self.tensors.values()),
            parameters=tuple(self.parameters),
            inputs=self.inputs,
        )
        layers = []
        for layer, times, kept in zip(self.layers, self.times, self.activation, strict=True):
            forward, input_grad, weight_grad = (
                tuple(overhead + t * n if t else 0.0 for n in sizes) for t in (max(times[0], 1e-7), *times[1:])
            )
            written = sum(self.tensors[name].num_bytes for name in layer.writes)
            layers.append(
                LayerProfile(name=layer.name, forward=forward, input_grad=input_grad, weight_grad=weight_grad,
                             activation=tuple(kept * n for n in sizes),
                             workspace=tuple(self.tensors[layer.writes[0]].num_bytes * n for n in sizes),
                             # One linear layer: W needs what it reads, and the gradient of what it writes.
                             kept=tuple(written * n for n in sizes) if any(weight_grad) else (),
                             kept_reads=layer.reads if any(weight_grad) else ())
            )  # fmt: skip
        return Profile(
            graph=graph, batch_sizes=tuple(sizes), layers=tuple(layers), device="synthetic", device_type="cuda",
            precision="bfloat16", source="analytic",
        )  # fmt: skip


def frozen_part(sketch: Sketch, *, vae_ms: float, text_ms: float, text_layers: int, text_elements: int) -> None:
    sketch.tensor("pixels", 3 * 512 * 512, dtype="uint8")
    sketch.tensor("tokens", 77, dtype="int64")
    sketch.tensor("latents", 4 * 64 * 64, dtype="float32")
    sketch.tensor("noisy", 4 * 64 * 64, dtype="float32")
    sketch.tensor("target", 4 * 64 * 64, dtype="float32")
    sketch.tensor("timesteps", 1, dtype="int64")
    previous = "pixels"
    for i in range(8):
        name = "latents" if i == 7 else sketch.tensor(f"vae{i}", 128 * 512 * 512 >> i)
        seconds = vae_ms / 8e3
        sketch.layer(f"vae.{i}", "vae", [previous], [name], seconds=seconds, parameters=4_000_000, trained=False)
        previous = name
    previous = "tokens"
    for i in range(text_layers):
        name = sketch.tensor("text" if i == text_layers - 1 else f"text{i}", text_elements)
        seconds = text_ms / 1e3 / text_layers
        size = 340_000_000 // text_layers
        sketch.layer(f"text.{i}", "text_encoder", [previous], [name], seconds=seconds, parameters=size, trained=False)
        previous = name
    sketch.layer("noise", "objective", ["latents"], ["noisy", "target", "timesteps"], seconds=1e-6, trained=False)


def unet(*, forward_ms: float = 10.0, vae_ms: float = 10.0, text_ms: float = 3.0) -> Profile:
    """In the size of Stable Diffusion 2.1 at 512 px: 60 trained layers with skips, 0.9 G parameters."""
    sketch = Sketch()
    frozen_part(sketch, vae_ms=vae_ms, text_ms=text_ms, text_layers=23, text_elements=77 * 1024)
    widths = (320, 640, 1280, 1280)
    work: list[tuple] = []

    def add(name, reads, channels, side, parameters):
        write = sketch.tensor(name, channels * side * side, grad=True)
        work.append((name, reads, [write], parameters, parameters * side * side))
        return write

    sketch.tensor("temb", 1280, grad=True)
    work.append(("time", ["timesteps"], ["temb"], 2_000_000, 2_000_000))
    hidden = add("conv_in", ["noisy"], 320, 64, 12_000)
    skips = [hidden]
    side = 64
    for level, width in enumerate(widths):
        for i in range(2):
            hidden = add(f"down{level}.res{i}", [hidden, "temb"], width, side, 18 * width * width)
            if level < 3:
                hidden = add(f"down{level}.attn{i}", [hidden, "text"], width, side, 16 * width * width)
            skips.append(hidden)
        if level < 3:
            side //= 2
            hidden = add(f"down{level}.half", [hidden], width, side, 9 * width * width)
            skips.append(hidden)
    for name, reads in (("mid.res0", ["temb"]), ("mid.attn", ["text"]), ("mid.res1", ["temb"])):
        hidden = add(name, [hidden, *reads], 1280, side, 18 * 1280 * 1280)
    for level in (3, 2, 1, 0):
        width = widths[level]
        for i in range(3):
            hidden = add(f"up{level}.res{i}", [hidden, skips.pop(), "temb"], width, side, 27 * width * width)
            if level < 3:
                hidden = add(f"up{level}.attn{i}", [hidden, "text"], width, side, 16 * width * width)
        if level:
            side *= 2
            hidden = add(f"up{level}.twice", [hidden], width, side, 9 * width * width)
    sketch.tensor("prediction", 4 * 64 * 64, grad=True)
    work.append(("conv_out", [hidden], ["prediction"], 12_000, 12_000 * 4096))
    total = sum(flops for *_, flops in work)
    for name, reads, writes, parameters, flops in work:
        seconds = forward_ms / 1e3 * flops / total
        sketch.layer(name, "unet", reads, writes, seconds=seconds, parameters=parameters, kept=4.0)
    sketch.tensor("loss", 1, grad=True, dtype="float32")
    sketch.layer("loss", "objective", ["prediction", "target"], ["loss"], seconds=1e-6)
    return sketch.profile()


def transformer(*, blocks: int = 57, forward_ms: float = 140.0, gigaparameters: float = 12.0) -> Profile:
    """In the size of FLUX.1-dev at 1024 px: a chain of equal blocks, 12 G parameters."""
    sketch = Sketch()
    frozen_part(sketch, vae_ms=40, text_ms=30, text_layers=24, text_elements=512 * 4096)
    sketch.tensor("vector", 3072, grad=True)
    hidden = sketch.tensor("x0", 4096 * 3072, grad=True)
    sketch.layer("time", "transformer", ["timesteps"], ["vector"], seconds=1e-5, parameters=10_000_000)
    sketch.layer("embed", "transformer", ["noisy", "text"], [hidden], seconds=2e-4, parameters=13_000_000)
    size = round((gigaparameters * GB - 30_000_000) / blocks)
    for i in range(blocks):
        written = sketch.tensor(f"x{i + 1}", 4608 * 3072, grad=True)
        seconds = forward_ms / 1e3 / blocks
        sketch.layer(f"block.{i}", "transformer", [hidden, "vector"], [written], seconds=seconds, parameters=size,
                     kept=16.0)  # fmt: skip
        hidden = written
    sketch.tensor("prediction", 64 * 4096, grad=True)
    sketch.layer("out", "transformer", [hidden], ["prediction"], seconds=2e-4, parameters=7_000_000)
    sketch.tensor("loss", 1, grad=True, dtype="float32")
    sketch.layer("loss", "objective", ["prediction", "target"], ["loss"], seconds=1e-6)
    return sketch.profile()


def chain(
    forward: Sequence[float],
    *,
    parameters: Sequence[int] | None = None,
    elements: int = 10,
    frozen: float = 0.0,
    frozen_parameters: int = 8,
    overhead: float = 0.0,
) -> Profile:
    """Layers of the given forward times a sample in a row; each gradient takes as long. `overhead` as in `Sketch`."""
    sketch = Sketch(inputs=("raw",))
    sketch.tensor("raw", elements)
    sketch.tensor("x", elements)
    sketch.layer("encode", "vae", ["raw"], ["x"], seconds=frozen or 1e-9, parameters=frozen_parameters, trained=False,
                 kept=0)  # fmt: skip
    hidden = "x"
    for i, seconds in enumerate(forward):
        written = sketch.tensor("loss" if i == len(forward) - 1 else f"h{i}", elements, grad=True, dtype="float32")
        count = parameters[i] if parameters else 100
        sketch.layer(f"layer{i}", "unet", [hidden], [written], seconds=seconds, parameters=count, kept=1.0,
                     input_grad=i > 0)  # fmt: skip
        hidden = written
    return sketch.profile(overhead=overhead)


def with_casts(profile: Profile, *, seconds: float, num_bytes: int) -> Profile:
    """The profile with casts and copies of every trained layer."""
    trained = set(profile.graph.backbone_layers)
    layers = (
        replace(layer, cast=seconds, copies=num_bytes) if layer.name in trained else layer for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def conditioned(profile: Profile, share: float) -> Profile:
    """The same model, which reads its own estimate: the first trained layer what the last one writes."""
    graph = profile.graph
    first, last = graph.backbone_layers[0], graph.backbone_layers[-1]
    added = {first: {"reads": ("estimate",)}, last: {"writes": ("estimate",)}}
    layers = tuple(
        replace(layer, **{key: (*getattr(layer, key), *names) for key, names in added.get(layer.name, {}).items()})
        for layer in graph.layers
    )
    backbone = replace(graph.backbones[0], estimate="estimate", self_conditioning=share)
    tensors = (*graph.tensors, TensorSpec(name="estimate", shape=(100,)))
    return replace(profile, graph=replace(graph, layers=layers, tensors=tensors, backbones=(backbone,)))


def with_forward_only(profile: Profile, factor: float) -> Profile:
    """The profile whose trained layers take so many times their forward where they keep nothing for a backward."""
    trained = set(profile.graph.backbone_layers)
    layers = (
        replace(layer, forward_only=tuple(factor * time for time in layer.forward)) if layer.name in trained else layer
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def drawn(precision: str = "bfloat16") -> Profile:
    """Text of 4 layers, read by 8 layers of a second a row that cost nothing to start and send next to nothing."""
    sketch = Sketch()
    frozen_part(sketch, vae_ms=8000.0, text_ms=4000.0, text_layers=4, text_elements=8)
    previous = "noisy"
    for i in range(8):
        name = sketch.tensor("prediction" if i == 7 else f"hidden{i}", 8, grad=True)
        sketch.layer(f"block{i}", "transformer", [previous, "text"], [name], seconds=1.0, parameters=10**6)
        previous = name
    sketch.tensor("loss", 1, grad=True)
    sketch.layer("loss", "objective", ["prediction", "target"], ["loss"], seconds=1e-9)
    profile = sketch.profile(overhead=0.0)
    specs = tuple(
        replace(one, shape=(1000, 1000)) if one.name.startswith("block") else one for one in profile.graph.parameters
    )
    return replace(profile, graph=replace(profile.graph, parameters=specs), precision=precision)


def cluster(
    num_ranks: int = 8,
    *,
    per_node: int = 8,
    memory: float = 80,
    intra_gb: float = 200.0,
    inter_gb: float = 6.0,
    bus_gb: float = 40.0,
    speeds: Sequence[float] | None = None,
) -> Cluster:
    """Nodes of equal size; `inter_gb` is one rank's, `bus_gb` a whole node's bandwidth between nodes, in GB/s."""
    speeds = speeds or [1.0] * num_ranks
    return Cluster(
        name="synthetic",
        devices=tuple(Device(name="synthetic", memory=round(memory * GB), speed=speed) for speed in speeds),
        nodes=tuple(rank // per_node for rank in range(num_ranks)),
        intra=Link(1e-5, intra_gb * GB),
        inter=Link(3e-5, inter_gb * GB),
        intra_reduce=AllReduce(latency=2e-5, bandwidth=intra_gb * GB),
        inter_reduce=AllReduce(latency=1e-4, bandwidth=bus_gb * GB),
    )


def workload(
    batch: int,
    *,
    checkpointed: tuple[str, ...] = (),
    width: int | None = 2,
    encoders: Storage = DEVICE,
    encode_chunk: int = 16,
    **states: int,
) -> Workload:
    """Mixed precision with Adam; `width`: bytes of a frozen number, None: the graph's."""
    frozen = DEVICE if width is None else DEVICE.narrow(width)
    return Workload(
        batch=batch,
        states=plain_states(**states),
        frozen=frozen,
        encoders=frozen.at(encoders),
        checkpointed=checkpointed,
        encode_chunk=encode_chunk,
    )


def slow_pairs(*slow: tuple[int, int], num_ranks: int = 4, num_layers: int = 8) -> Setting:
    """A chain on machines of which some pairs have a link of a twentieth of the bandwidth."""
    links = cluster(num_ranks)
    usual = links.intra
    pairs = tuple(
        PairLink(
            first=pair[0],
            second=pair[1],
            latency=usual.latency,
            bandwidth=usual.bandwidth / (20 if pair in slow else 1),
        )
        for pair in combinations(range(num_ranks), 2)
    )
    return Setting(
        profile=chain([1e-3] * num_layers),
        cluster=replace(links, pairs=pairs),
        workload=workload(8),
    )

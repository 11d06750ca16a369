"""The costs of every layer of a model on one device, by batch size.

A profile holds what was measured. Its values for a number of samples lie on the curves of `costs/curves.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from diffusionpipe.costs.actions import NO_HOST, HostTimes, Link
from diffusionpipe.costs.cluster import AllReduce
from diffusionpipe.costs.curves import ascending_means, ascending_peaks, cost_at
from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.costs.graph import ModelGraph
from diffusionpipe.costs.mode import Mode
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """The times and bytes of one layer; every tuple of them has one entry for each batch size of the profile."""

    name: str
    forward: tuple[Seconds, ...]
    """Time of the forward."""
    input_grad: tuple[Seconds, ...]
    """Time of the gradient with respect to the inputs; 0 where no input needs one."""
    weight_grad: tuple[Seconds, ...]
    """Time of the gradient with respect to the trained parameters; 0 where none is trained."""
    activation: tuple[Bytes, ...]
    """Bytes kept from the forward for the backward: all that the layer made, its outputs included, each storage once.
    Its inputs belong to the layers that wrote them, so a stage keeps the sum over its layers and all that it reads from
    outside. 0 for a frozen layer."""
    workspace: tuple[Bytes, ...]
    """Bytes beyond that at the peak of the layer's forward or backward; inputs and outputs do not count."""
    forward_spread: tuple[Seconds, ...] = ()
    """Half the distance between the quartiles of the measured forward times; () where nothing was measured."""
    backward_spread: tuple[Seconds, ...] = ()
    """Half the distance between the quartiles of the measured times of whole backwards; () where nothing was
    measured."""
    cast: Seconds = 0.0
    """Time of copying the layer's weights in the precision in which it computes, which is done once for all
    micro-batches of an iteration, and for each of them where the layer is recomputed. 0 for a frozen layer, whose
    forward contains it. A file without it counts casts in all forwards."""
    copies: Bytes = 0
    """Bytes of the copies that `cast` makes. A file without it counts them in the activations."""
    host: HostTimes = NO_HOST
    """The time in which the host issues the layer's kernels, where the other times are the device's alone. A file
    without it has both in one."""
    forward_only: tuple[Seconds, ...] = ()
    """Time of a forward without gradients, which keeps nothing for a backward: of a probe (`schedules.several.probes`).
    () where it was not measured, as in computed profiles and in models without probes: then it is `forward`."""
    drawing: tuple[Bytes, ...] = ()
    """Bytes of the forward at its peak where nothing is kept for a backward, its outputs included. A file without it
    leaves them to be bounded by activation and workspace."""
    kept: tuple[Bytes, ...] = ()
    """Bytes that op I leaves for op W where the backward is split. W needs inputs and output gradients of the linear
    layers, convolutions and embeddings inside the layer, each storage once. () where they were not counted: then they
    are all that the layer reads and writes, which is right of a layer that is one such module."""
    kept_reads: tuple[str, ...] = ()
    """Tensors that the layer reads and that stay for W besides, under the names with which they were written first;
    their bytes are not in `kept`."""
    by_size: tuple[float, ...] = ()
    """Where samples have several sizes: the layer's time at each size, divided by the mean over all samples, which the
    other fields hold. () where they have one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSize:
    """One of several sizes of the samples of a profile; the times of layers at it are in `LayerProfile.by_size`."""

    share: float
    """The part of all samples that have this size."""
    crossing: float
    """The bytes between layers of a sample of this size, as a factor of the bytes at the largest size."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of a model's layers on one device at some batch sizes, measured or computed.

    Raises:
        ValueError: layers, batch sizes and costs do not fit together, or a value is negative or not a number.
    """

    graph: ModelGraph
    batch_sizes: tuple[int, ...]
    """The batch sizes at which layers were measured or computed, in samples, ascending."""
    layers: tuple[LayerProfile, ...]
    """The profiles of the layers, in the order of the graph's layers."""
    device: str
    """Name of the device, e.g. "NVIDIA H200" or "AMD EPYC 7B13, 1 thread"."""
    device_type: str
    """The type of the device in torch: "cpu" or "cuda"."""
    precision: str
    """"float32", "bfloat16" (autocast) or "float64"."""
    source: str
    """The source of the times: "measured" or "analytic"."""
    mode: Mode | None = None
    """Mode of the kernels whose times were computed; None where times were measured, and in files that do not say it.
    """
    versions: tuple[tuple[str, str], ...] = ()
    """(package, version) of each package with which the profile was made."""
    link: Link | None = None
    """The link between the ranks of the machine that measured together; None where one measured alone."""
    reduce: AllReduce | None = None
    """The cost of a sum over the ranks that measured together; None where one measured alone."""
    update: Seconds = 0.0
    """Time of clipping, optimizer and average for each trained parameter of a rank; 0 where it was not measured."""
    waking: tuple[tuple[Seconds, Seconds], ...] = ()
    """(wait, extra time of an action after it), ascending; () where it was not measured. See `costs/waking.py`."""
    origin: str = ""
    """The origin of its times besides `source`, in words; "" where nothing has changed them."""
    decoding: Decoding | None = None
    """The memory that the model's VAE needs to decode a sample that it draws; None for a model without one, and in
    files that do not say it."""
    sizes: tuple[ProfiledSize, ...] = ()
    """The sizes of samples, the one of the graph first, where times are a mean of several; () where there is one."""

    def __post_init__(self) -> None:
        problems = []
        if tuple(layer.name for layer in self.layers) != tuple(layer.name for layer in self.graph.layers):
            problems.append("the profiled layers are not the layers of the model")
        if not self.batch_sizes or list(self.batch_sizes) != sorted({b for b in self.batch_sizes if b > 0}):
            problems.append(f"batch sizes must be positive and ascending; got {self.batch_sizes}")
        for layer in self.layers:
            columns = {
                "forward": layer.forward,
                "input_grad": layer.input_grad,
                "weight_grad": layer.weight_grad,
                "activation": layer.activation,
                "workspace": layer.workspace,
                **({"forward_only": layer.forward_only} if layer.forward_only else {}),
                **({"drawing": layer.drawing} if layer.drawing else {}),
                **({"kept": layer.kept} if layer.kept else {}),
            }
            for name, values in columns.items():
                if len(values) != len(self.batch_sizes):
                    problems.append(f"{layer.name}: {name} has {len(values)} entries for {len(self.batch_sizes)} sizes")
                if any(not 0 <= value < inf for value in values):
                    problems.append(f"{layer.name}: {name} holds a value that is negative or no number")
            if len(layer.by_size) != len(self.sizes) or not all(0 <= factor < inf for factor in layer.by_size):
                problems.append(f"{layer.name}: by_size has one factor, not negative, for each of the profile's sizes")
            if not (layer.cast >= 0 and layer.copies >= 0):
                problems.append(f"{layer.name}: cast and copies must not be negative")
            if not any(layer.forward):
                problems.append(f"{layer.name}: every forward time is 0; a layer takes time")
        waits = [wait for wait, _ in self.waking]
        if waits != sorted({wait for wait in waits if wait > 0}) or not all(extra >= 0 for _, extra in self.waking):
            problems.append(f"waking must be (wait, extra time) of ascending waits, none negative; got {self.waking}")
        if self.sizes and not abs(sum(size.share for size in self.sizes) - 1) < 1e-6:
            problems.append("the shares of sizes must add up to 1")
        if not self.update >= 0:
            problems.append(f"update must not be negative; got {self.update}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def counts_kept(self) -> bool:
        """Whether every trained layer has the bytes that a split backward keeps."""
        return all(layer.kept or not any(layer.weight_grad) for layer in self.layers)

    @property
    def crossing(self) -> float:
        """The mean over samples of the bytes between layers, as a factor of the bytes that the graph states.

        The graph is of the largest size. 1 where samples have one size.
        """
        return sum(size.share * size.crossing for size in self.sizes) if self.sizes else 1.0

    @cached_property
    def _layer(self) -> dict[str, LayerProfile]:
        return {layer.name: layer for layer in self.layers}

    def layer(self, name: str) -> LayerProfile:
        """The costs of the layer with this name, as they were measured.

        Raises:
            KeyError: there is no such layer.
        """
        return self._layer[name]

    @cached_property
    def _curves(self) -> dict[str, LayerProfile]:
        """Name of a layer -> its profile with times and bytes that never fall with samples, as `cost_at` needs them."""
        return {layer.name: _ascending(layer) for layer in self.layers}

    def forward(self, name: str, batch: float) -> Seconds:
        """The seconds of the layer's forward for `batch` samples."""
        return cost_at(self.batch_sizes, self._curves[name].forward, batch)

    def forward_only(self, name: str, batch: float) -> Seconds:
        """The seconds of the layer's forward without gradients for `batch` samples; its forward if not measured."""
        known = self._curves[name].forward_only
        return cost_at(self.batch_sizes, known, batch) if known else self.forward(name, batch)

    def input_grad(self, name: str, batch: float) -> Seconds:
        """The seconds of the layer's input gradient for `batch` samples."""
        return cost_at(self.batch_sizes, self._curves[name].input_grad, batch)

    def weight_grad(self, name: str, batch: float) -> Seconds:
        """The seconds of the layer's weight gradient for `batch` samples."""
        return cost_at(self.batch_sizes, self._curves[name].weight_grad, batch)

    def activation(self, name: str, batch: float) -> Bytes:
        """The bytes that the layer keeps from its forward for its backward, for `batch` samples, without its inputs."""
        return round(cost_at(self.batch_sizes, self._curves[name].activation, batch))

    def kept(self, name: str, batch: float) -> Bytes:
        """The bytes that op I of the layer leaves for its op W, for `batch` samples, without the tensors that it reads.

        All that the layer writes where they were not counted; 0 for a layer without trained parameters.
        """
        known = self._curves[name].kept
        if known:
            return round(cost_at(self.batch_sizes, known, batch))
        # Without trained parameters there is no W to keep anything for.
        return round(self._written[name] * batch) if self.weight_grad(name, batch) else 0

    def kept_reads(self, name: str) -> tuple[str, ...]:
        """The tensors that the layer reads and that stay for its op W, by the names with which they were written first.

        All tensors that a trained layer reads where they were not counted.
        """
        layer = self._layer[name]
        if layer.kept:
            return layer.kept_reads
        return self.graph.layer(name).reads if any(layer.weight_grad) else ()

    def drawing(self, name: str, batch: float) -> Bytes:
        """The peak bytes of the layer's forward for `batch` samples where nothing is kept, its outputs included.

        An upper bound where it was not measured.
        """
        known = self._curves[name].drawing
        if known:
            return round(cost_at(self.batch_sizes, known, batch))
        written = self.activation(name, batch) or round(self._written[name] * batch)  # a frozen layer has no activation
        return written + self.workspace(name, batch)

    @cached_property
    def _written(self) -> dict[str, Bytes]:
        """Name of a layer -> the bytes of the tensors that it writes for one sample."""
        tensor = self.graph.tensor
        return {layer.name: sum(tensor(name).num_bytes for name in layer.writes) for layer in self.graph.layers}

    def workspace(self, name: str, batch: float) -> Bytes:
        """The peak temporary bytes of the layer's forward or backward for `batch` samples, beyond its activation."""
        return round(cost_at(self.batch_sizes, self._curves[name].workspace, batch))


def _ascending(layer: LayerProfile) -> LayerProfile:
    return replace(
        layer,
        forward=ascending_means(layer.forward),
        input_grad=ascending_means(layer.input_grad),
        weight_grad=ascending_means(layer.weight_grad),
        forward_only=ascending_means(layer.forward_only),
        activation=ascending_peaks(layer.activation),
        workspace=ascending_peaks(layer.workspace),
        drawing=ascending_peaks(layer.drawing),
        kept=ascending_peaks(layer.kept),
    )

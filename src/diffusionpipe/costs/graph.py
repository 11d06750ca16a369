"""A model as plain data: layers in order, the named tensors between them, their parameters.

The planning half sees a model only through this. From the names alone follow which tensors cross a cut, which layers
are frozen and can fill bubbles, and which tensors carry a gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import prod

from diffusionpipe.costs.forms import Form, numbers_in
from diffusionpipe.units import Bytes

BYTES_OF_DTYPE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
BYTES_OF_STORED = {form.value: 1 for form in Form}
"""Bytes of a number of a stored matrix's codes, whose dtype is the name of their form."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Ends of the names of attention's projections in diffusers' denoisers, which get adapters by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The name, dtype and shape of a tensor between layers, without its batch dimension, which is always the first."""

    name: str
    shape: tuple[int, ...]
    """Per sample; () for one number a sample."""
    dtype: str = "float32"
    needs_gradient: bool = False
    """Whether something trainable lies upstream."""

    @property
    def num_bytes(self) -> Bytes:
        """The bytes of the tensor for one sample."""
        return prod(self.shape) * BYTES_OF_DTYPE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """The shape and dtype of one parameter under its canonical name, e.g. "unet.conv_in.weight"."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """A dtype of torch, or the form of a stored matrix's codes."""
    is_trainable: bool = True

    @property
    def num_bytes(self) -> Bytes:
        """The bytes of the parameter itself, without its gradient and states; of a stored matrix its codes."""
        return prod(self.shape) * (BYTES_OF_DTYPE.get(self.dtype) or BYTES_OF_STORED[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The smallest piece of a model that is profiled and placed: the tensors and parameters that it uses, by name."""

    name: str
    component: str
    """"vae", "text_encoder", "unet", "objective", ..."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Canonical names; a parameter that two layers name is tied."""
    flops: int = 0
    """Floating-point operations of one sample's forward; 0 where nothing was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A trained network with its own loss, by the names of its tensors; a cascade has several."""

    name: str = ""
    """The name that a recipe gives it; "" where it is the only one."""
    loss: str = "loss"
    """The tensor of the losses, one number for each sample."""
    prediction: str | None = "prediction"
    """The tensor that the denoiser writes and the loss reads; None if the model cannot be sampled from."""
    noisy: str = "noisy"
    """The noisy samples that the denoiser reads."""
    timesteps: str = "timesteps"
    """The times of the noisy samples, which the denoiser reads."""
    estimate: str | None = None
    """The tensor of the estimate of the clean samples: the loss layer writes it, and the denoiser's next pass reads it;
    zeros where no pass came before. None for a denoiser without self-conditioning."""
    self_conditioning: float = 0.0
    """Share of the samples of every batch for which the denoiser reads an estimate while training, 0 to 1."""

    @property
    def result(self) -> str:
        """The name of the tensor that the backbone computes for drawing: its prediction, or its loss without one."""
        return self.prediction or self.loss


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A model as plain data: its layers in order, their tensors and parameters, and its backbones with their losses."""

    layers: tuple[LayerSpec, ...]
    """The layers of the model, in an order in which they can run."""
    tensors: tuple[TensorSpec, ...]
    """Every tensor that a layer reads or writes, raw inputs included."""
    parameters: tuple[ParameterSpec, ...]
    inputs: tuple[str, ...]
    """Raw inputs: the tensors that the data loader yields."""
    backbones: tuple[Backbone, ...] = (Backbone(),)
    """In the order of sampling. No trained layer belongs to two of them."""

    @cached_property
    def _tensor(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _layer(self) -> dict[str, LayerSpec]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _trainable(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if p.is_trainable)

    def tensor(self, name: str) -> TensorSpec:
        """The tensor with this name.

        Raises:
            KeyError: there is none.
        """
        return self._tensor[name]

    def layer(self, name: str) -> LayerSpec:
        """The layer with this name.

        Raises:
            KeyError: there is none.
        """
        return self._layer[name]

    @cached_property
    def estimates(self) -> frozenset[str]:
        """The names of the estimates: the tensors that backbones with self-conditioning write for their next pass."""
        return frozenset(backbone.estimate for backbone in self.backbones if backbone.estimate is not None)

    @property
    def probes(self) -> tuple[tuple[str, Fraction], ...]:
        """(backbone's name, share of the samples for which it reads its own estimate in training), if this is not 0."""
        return tuple((b.name, as_fraction(b.self_conditioning)) for b in self.backbones if b.self_conditioning)

    @cached_property
    def probed_layers(self) -> frozenset[str]:
        """The layers that training also runs without gradients, to make estimates for self-conditioning."""
        probed = dict(self.probes)
        return frozenset(name for b in self.backbones if b.name in probed for name in self.layers_of(b))

    @cached_property
    def frozen_layers(self) -> tuple[str, ...]:
        """The layers, in order, that neither are trainable nor depend on anything trainable; they can fill bubbles."""
        # Estimates come from the trained part, though the layers that write them run later.
        tainted = set(self.estimates)
        frozen = []
        for layer in self.layers:
            if any(p in self._trainable for p in layer.parameters) or not tainted.isdisjoint(layer.reads):
                tainted.update(layer.writes)
            else:
                frozen.append(layer.name)
        return tuple(frozen)

    @cached_property
    def backbone_layers(self) -> tuple[str, ...]:
        """The layers that are not frozen, backbone after backbone, in order."""
        return tuple(name for backbone in self.backbones for name in self.layers_of(backbone))

    def layers_of(self, backbone: Backbone) -> tuple[str, ...]:
        """The trained layers on which the backbone's loss depends, in order; all trained ones if it is the only one."""
        frozen = set(self.frozen_layers)
        trained = [layer for layer in self.layers if layer.name not in frozen]
        if len(self.backbones) > 1:
            trained = upstream(trained, backbone.loss)
        return tuple(layer.name for layer in trained)

    def alone(self, backbone: Backbone) -> "ModelGraph":
        """The model with this backbone as its only one; frozen layers, tensors and parameters stay."""
        if len(self.backbones) == 1:
            return self
        kept = {*self.frozen_layers, *self.layers_of(backbone)}
        return replace(self, layers=tuple(layer for layer in self.layers if layer.name in kept), backbones=(backbone,))

    @cached_property
    def frozen_tensors(self) -> frozenset[str]:
        """The names of the raw inputs and of the tensors that frozen layers write."""
        return frozenset({*self.inputs, *self.writes_of(self.frozen_layers)})

    @cached_property
    def read_tensors(self) -> frozenset[str]:
        """The names of all tensors that any layer reads."""
        return frozenset(name for layer in self.layers for name in layer.reads)

    def reads_of(self, layers: Iterable[str]) -> tuple[str, ...]:
        """The tensors that these layers read before one of them has written them, in the order of first reading."""
        wanted = set(layers)
        written: set[str] = set()
        reads: dict[str, None] = {}
        for layer in self.layers:
            if layer.name in wanted:
                reads.update(dict.fromkeys(name for name in layer.reads if name not in written))
                written.update(layer.writes)
        return tuple(reads)

    def writes_of(self, layers: Iterable[str]) -> tuple[str, ...]:
        """The tensors that these layers write, in the model's order."""
        wanted = set(layers)
        return tuple(name for layer in self.layers if layer.name in wanted for name in layer.writes)

    def parameters_of(self, layers: Iterable[str]) -> frozenset[str]:
        """The canonical names of the parameters that these layers use."""
        wanted = set(layers)
        return frozenset(name for layer in self.layers if layer.name in wanted for name in layer.parameters)

    def flows(self, blocks: Sequence[Sequence[str]]) -> dict[tuple[int, int], tuple[str, ...]]:
        """(producer, consumer) -> the tensors that block `consumer` reads from block `producer`, by index in `blocks`.

        A tensor goes straight from the block that writes it to each block that reads it, never through others. Raw
        inputs belong to no block; the frozen block passes them on (see `frozen_outputs`). An estimate goes back, to a
        block that comes first or, if there is one block alone, to itself.
        """
        writer = {name: block for block, layers in enumerate(blocks) for name in self.writes_of(layers)}
        flows: dict[tuple[int, int], tuple[str, ...]] = {}
        for consumer, layers in enumerate(blocks):
            for name in self.reads_of(layers):
                producer = writer.get(name)
                if producer is not None:
                    flows[producer, consumer] = (*flows.get((producer, consumer), ()), name)
        return flows

    def frozen_outputs(self, layers: Iterable[str]) -> tuple[str, ...]:
        """The raw inputs and frozen outputs that these backbone layers read, in the order of first reading."""
        return tuple(name for name in self.reads_of(layers) if name in self.frozen_tensors)


def is_kept_narrow(parameter: ParameterSpec) -> bool:
    """Whether the parameter is trained and kept in bfloat16, so that updates widen and round it."""
    return parameter.is_trainable and parameter.dtype == "bfloat16"


def frozen_store(graph: ModelGraph) -> str:
    """The name of the stored form ("float8", "int8", "nf4") with the most bytes among frozen parameters.

    "bfloat16" where none is stored and some are in bfloat16; "" where all are wide.
    """
    return next(iter(_forms_of(graph.parameters)), "")


def frozen_stores(graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """Form, as `frozen_store` names it -> the components whose frozen parameters have it, forms of most bytes first.

    "" is the form of components whose frozen parameters are wide.
    """
    own: dict[str, list[ParameterSpec]] = {}
    for parameter in graph.parameters:
        if not parameter.is_trainable:
            own.setdefault(parameter.name.partition(".")[0], []).append(parameter)
    found: dict[str, list[str]] = {form: [] for form in _forms_of(graph.parameters)}
    for component, parameters in own.items():
        found.setdefault(next(iter(_forms_of(parameters)), ""), []).append(component)
    return {form: tuple(components) for form, components in found.items() if components}


def _forms_of(parameters: Iterable[ParameterSpec]) -> list[str]:
    """The stored forms of the frozen ones among these parameters, most bytes first; else bfloat16 if any has it."""
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if not parameter.is_trainable and (parameter.dtype in BYTES_OF_STORED or parameter.dtype == "bfloat16"):
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_bytes
    # A stored form says more about a model than bfloat16 does, so bfloat16 counts only where there is none.
    forms = {name: size for name, size in sizes.items() if name in BYTES_OF_STORED} or sizes
    return sorted(forms, key=lambda name: -forms[name])


def scales_of(parameters: Iterable[ParameterSpec]) -> frozenset[str]:
    """The names of the scales that belong to the codes among these parameters.

    >>> scales_of([ParameterSpec(name="unet.proj.codes", shape=(8, 8), dtype="int8", is_trainable=False)])
    frozenset({'unet.proj.scales'})
    """
    return frozenset(f"{p.name.removesuffix('codes')}scales" for p in parameters if p.dtype in BYTES_OF_STORED)


def numbers_of(graph: ModelGraph, *, trained: bool) -> int:
    """The number of weights of the trained parameters, or of all other parameters where `trained` is False.

    A stored matrix counts the weights that it has when it is wide; its scales do not count.
    """
    chosen = [parameter for parameter in graph.parameters if parameter.is_trainable == trained]
    scales = scales_of(chosen)
    return sum(
        numbers_in(Form(p.dtype), prod(p.shape)) if p.dtype in BYTES_OF_STORED else prod(p.shape)
        for p in chosen
        if p.name not in scales
    )


def wider_bytes(graph: ModelGraph) -> tuple[Bytes, Bytes]:
    """(bytes of the frozen parameters not stored in one byte or four bits a number, bytes of all frozen parameters)."""
    frozen = [parameter for parameter in graph.parameters if not parameter.is_trainable]
    scales = scales_of(frozen)
    wider = [p for p in frozen if p.dtype not in BYTES_OF_STORED and p.name not in scales]
    return sum(p.num_bytes for p in wider), sum(p.num_bytes for p in frozen)


def as_fraction(share: float) -> Fraction:
    """The fraction nearest to `share` with a denominator of at most 4096.

    >>> as_fraction(0.5), as_fraction(0.3333)
    (Fraction(1, 2), Fraction(1, 3))
    """
    return Fraction(share).limit_denominator(4096)


def upstream(layers: Sequence[LayerSpec], tensor: str) -> list[LayerSpec]:
    """The ones of these layers on which the tensor depends, in the order of `layers`, in which they can run."""
    wanted, found = {tensor}, []
    # From the last layer back: each adds the tensors that it reads before their writers are looked at.
    for layer in reversed(layers):
        if not wanted.isdisjoint(layer.writes):
            found.append(layer)
            wanted.update(layer.reads)
    return found[::-1]

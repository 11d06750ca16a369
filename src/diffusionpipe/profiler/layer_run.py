"""One layer that runs alone, as a stage runs it: forward, gradient of its inputs, whole backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.cut.glue import tables_of
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, own_parameters
from diffusionpipe.runtime.compute.casts import Casts
from diffusionpipe.runtime.compute.split import Deferred, Forward, cast_weights, run_with
from diffusionpipe.runtime.compute.stage import module_forwards
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.units import Seconds

MIN_SHARE = 0.02
"""The least share of a whole backward for W if a parameter is trained: noise must not make it 0 or negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """A layer with one batch of its inputs, ready to run forward and backward; its parameters are on their device."""

    layer: Layer
    component: nn.Module
    """The component that has the layer's modules."""
    reads: Mapping[str, Tensor]
    """The layer's inputs by name, detached; inputs that need a gradient require one."""
    trained: tuple[nn.Parameter, ...]
    """The layer's trained parameters."""
    is_frozen: bool
    """Whether the layer is frozen, so that it has no backward."""
    context: Callable[[], AbstractContextManager[object]]
    """Makes the context of autocast, which is entered for each forward."""
    forwards: tuple[tuple[nn.Module, Forward], ...]
    """Modules of the layer, each with a forward that reads a copy of its weights."""
    weights: tuple[nn.Parameter, ...]
    """The parameters that are copied for these forwards."""
    casts: Casts
    """The copies of the weights; `cast` makes them again each time."""
    narrow: torch.dtype | None
    """The type of the copies; None without autocast."""

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that require a gradient."""
        return [tensor for tensor in self.reads.values() if tensor.requires_grad]

    def cast(self) -> None:
        """Copy the weights in autocast's dtype, as a stage does once in an iteration; nothing without autocast."""
        self.casts.drop()
        if self.narrow is not None:
            self.casts.make(self.weights, self.narrow)

    def forward(self, *, keeps: bool = True) -> tuple[Tensor, ...]:
        """Run the layer forward; returns its outputs. It reads the copies of `cast`.

        `keeps`: whether tensors for a backward are kept.
        """
        reads = (self.reads[name] for name in self.layer.reads)
        forwards = self.forwards if self.casts else ()
        with torch.set_grad_enabled(keeps and not self.is_frozen), self.context():
            written: tuple[Tensor, ...] = run_with(forwards, None, self.casts, self.layer.run, self.component, *reads)
        return written

    def input_grad(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs in `differentiable`; None for an input on which no output depends.

        Parameters get no gradients. `outputs`: the outputs from which the backward starts; `gradients`: theirs.
        """
        return torch.autograd.grad(outputs, self.differentiable, gradients, allow_unused=True)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run the whole backward: it adds the gradients of parameters to their `.grad`, as training does.

        The gradients of inputs are computed too, and dropped. `outputs`: the outputs from which the backward starts;
        `gradients`: their gradients.
        """
        torch.autograd.backward(outputs, gradients)
        # Inputs are the same in each run: their gradients must not add up.
        for tensor in self.reads.values():
            tensor.grad = None

    def put_aside(self) -> Deferred:
        """The tensors that op I puts aside for op W of this batch; runs a forward and the input gradient."""
        deferred = Deferred()
        reads = (self.reads[name] for name in self.layer.reads)
        with self.context():
            outputs = run_with(self.forwards, deferred, self.casts, self.layer.run, self.component, *reads)
        self.backward(*self.gradients_like(outputs))
        return deferred

    def gradients_like(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(the outputs from which a backward starts, a random gradient for each)."""
        starts = [tensor for tensor in outputs if tensor.requires_grad]
        return starts, [torch.randn_like(tensor) for tensor in starts]


def layer_run(
    graph: LayerGraph,
    model: ModelGraph,
    layer: Layer,
    tensors: Mapping[str, Tensor],
    context: Callable[[], AbstractContextManager[object]],
    narrow: torch.dtype | None = None,
) -> LayerRun:
    """A layer with its inputs, taken from `tensors`, ready to run; its trained parameters get gradients of 0.

    With these gradients its backward adds to them, as it does after a first micro-batch. `context` makes the context of
    autocast, and `narrow` is its dtype. Frozen layers get no copies of weights, since each fill casts for itself.
    """
    component = graph.components[layer.component]
    is_frozen = layer.name in model.frozen_layers
    reads = {
        name: tensors[name].detach().requires_grad_(model.tensor(name).needs_gradient and not is_frozen)
        for name in layer.reads
    }
    trained = tuple(dict.fromkeys(p for p in own_parameters(layer, component) if p.requires_grad))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    forwards = module_forwards(layer, component)
    weights = () if is_frozen or narrow is None else cast_weights(forwards)
    return LayerRun(
        layer=layer,
        component=component,
        reads=reads,
        trained=trained,
        is_frozen=is_frozen,
        context=context,
        forwards=forwards,
        weights=tuple(dict.fromkeys(weight for weight in weights if weight.dtype is torch.float32)),
        casts=Casts(),
        narrow=narrow,
    )


def release(run: LayerRun) -> None:
    """Free the gradients of the run's parameters and the copies of its weights."""
    for parameter in run.trained:
        parameter.grad = None
    run.casts.drop()


def weight_keys(run: LayerRun) -> set[int]:
    """The keys (`storage_of`) of the storages of a layer's parameters, their copies, buffers and constant tables."""
    own = (p for p in own_parameters(run.layer, run.component) if p.device.type != "meta")
    constant = (*run.component.buffers(), *tables_of([run.layer]))
    return {storage_of(tensor) for tensor in (*own, *run.casts.copies, *constant)}


def split_backward(
    whole: Seconds, input_grad: Seconds, *, has_inputs: bool, is_trained: bool
) -> tuple[Seconds, Seconds]:
    """(seconds of I, seconds of W), which add up to `whole`, the seconds of the whole backward.

    I is the gradient of the inputs alone, measured or counted; W is the rest, at least `MIN_SHARE` of the whole. W is 0
    for a layer without trained parameters, and I is 0 if no input needs a gradient.
    """
    if not is_trained:
        return (whole, 0.0) if has_inputs else (0.0, 0.0)
    if not has_inputs:
        return 0.0, whole
    input_grad = min(input_grad, (1 - MIN_SHARE) * whole)
    return input_grad, whole - input_grad

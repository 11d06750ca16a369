"""The operations and bytes of every layer at one batch size, counted on fake tensors."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.profiler.counted_memory import KnownRun, MemoryRun, MemoryWatch, run_for_memory
from diffusionpipe.profiler.layer_run import LayerRun, layer_run, release, weight_keys
from diffusionpipe.profiler.memory import KeptBytes, LiveBytes
from diffusionpipe.profiler.operations import CudaCasts, Operation, OperationTrace
from diffusionpipe.profiler.substitution import fake_weights
from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """The operations of one layer's forward and backward at one batch size, and the bytes of its tensors."""

    forward: tuple[Operation, ...]
    """The operations of the forward."""
    input_grad: tuple[Operation, ...]
    """The operations of the gradient of the inputs alone."""
    backward: tuple[Operation, ...]
    """The operations of the whole backward."""
    has_inputs: bool
    """Whether an input needs a gradient."""
    is_trained: bool
    """Whether a parameter of the layer is trained."""
    activation: Bytes
    """Bytes that the layer keeps for its backward, as in `LayerProfile`."""
    workspace: Bytes
    """Temporary bytes while the layer runs, as in `LayerProfile`."""
    drawing: Bytes
    """Bytes of the forward at its peak where nothing is kept for a backward, as in `LayerProfile`."""
    kept: Bytes
    """Bytes that the layer keeps from its I to its W besides tensors that it reads, as in `LayerProfile`."""
    kept_reads: tuple[str, ...]
    """The tensors that the layer reads and leaves for its W, as in `LayerProfile`."""
    cast: tuple[Operation, ...] = ()
    """The operations that copy the layer's weights to autocast's type, once in an iteration."""
    copies: Bytes = 0
    """Bytes of the copies of the weights that `cast` makes."""


def count_layers(
    graph: LayerGraph,
    model: ModelGraph,
    batch: int,
    *,
    precision: str,
    device_type: str,
    step: Callable[[], None],
) -> dict[str, LayerCount]:
    """Layer -> its operations and bytes for `batch` samples; needs neither weights nor the device.

    `step` is called after each layer.
    """
    ledger = KeptBytes(model)
    counted: dict[str, tuple[_Traces, MemoryRun]] = {}
    known: dict[Hashable, _Known] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), fake_weights(graph):
        tensors = {
            spec.name: torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in graph.given
        }
        for layer in graph.layers:
            narrow = torch.bfloat16 if precision == "bfloat16" else None
            run = layer_run(graph, model, layer, tensors, _casts(precision, device_type), narrow)
            written, traces, memory = _count(layer, run, ledger, known)
            # Its outputs are among `tensors` then, and would stay there beyond their last reader.
            counted[layer.name] = traces, replace(memory, written=())
            tensors.update(written)
            release(run)
            step()
    activation = ledger.totals()
    return {
        name: traces.count(activation[name], memory, ledger.put_aside[name])
        for name, (traces, memory) in counted.items()
    }


def _casts(precision: str, device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes contexts with autocast as on a device of this type; without effect but for bfloat16."""

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            if precision == "bfloat16":  # CPU autocast works without a GPU; `CudaCasts` adds what a GPU casts besides
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
                if device_type == "cuda":
                    stack.enter_context(CudaCasts())
            yield

    return context


@dataclass(slots=True)
class _Traces:
    """The operations of one run of a layer, by part of the run; the run fills them in."""

    run: LayerRun
    """The run whose operations are noted."""
    cast: OperationTrace = field(default_factory=OperationTrace)
    """The operations that copy the weights."""
    forward: OperationTrace = field(default_factory=OperationTrace)
    """The operations of the forward."""
    input_grad: OperationTrace = field(default_factory=OperationTrace)
    """The operations of the gradient of the inputs alone."""
    backward: OperationTrace = field(default_factory=OperationTrace)
    """The operations of the whole backward."""
    is_differentiated: bool = False
    """Whether the layer has a backward."""
    copies: Bytes = 0
    """Bytes of the copies of the weights."""

    def trace_cast(self) -> None:
        """Note the operations that copy the weights to the narrow type."""
        with self.cast:
            self.run.cast()
        self.copies = sum(copy.nbytes for copy in self.run.casts.copies)

    def trace_input_grad(self, starts: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradient of the inputs alone, and note its operations; the graph stays for the whole backward.

        `starts`, `gradients`: the outputs from which the backward starts, and their gradients.
        """
        self.is_differentiated = True
        if self.run.differentiable:
            with self.input_grad:
                torch.autograd.grad(starts, self.run.differentiable, gradients, retain_graph=True, allow_unused=True)

    def repeat(self, other: "_Traces") -> None:
        """Copy the operations of the backward from the traces of an equal layer."""
        self.input_grad, self.backward = other.input_grad, other.backward
        self.is_differentiated = other.is_differentiated

    def count(self, activation: Bytes, memory: MemoryRun, kept_reads: tuple[str, ...]) -> LayerCount:
        """The layer's count: the noted operations, and the bytes in the arguments."""
        return LayerCount(
            forward=tuple(self.forward.operations),
            input_grad=tuple(self.input_grad.operations),
            backward=tuple(self.backward.operations),
            has_inputs=self.is_differentiated and bool(self.run.differentiable),
            is_trained=self.is_differentiated and bool(self.run.trained),
            activation=activation,
            workspace=memory.workspace,
            drawing=memory.drawing,
            kept=memory.put_aside.own,
            kept_reads=kept_reads,
            cast=tuple(self.cast.operations),
            copies=self.copies,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The operations and bytes of a backward that was counted, to be used for equal layers."""

    traces: _Traces
    run: KnownRun


def _count(
    layer: Layer, run: LayerRun, ledger: KeptBytes, known: dict[Hashable, _Known]
) -> tuple[dict[str, Tensor], _Traces, MemoryRun]:
    """Run a layer; returns its outputs by name, its operations and its memory.

    The bytes that it keeps are added to `ledger`. A backward equal to one in `known` is not run again, and a new one is
    added there.
    """
    traces = _Traces(run=run)
    traces.trace_cast()
    key: Hashable = None

    def known_run(outputs: Sequence[Tensor]) -> KnownRun | None:
        nonlocal key
        key = tuple(traces.forward.operations), autograd_graph(outputs, run.differentiable)
        found = known.get(key)
        if found is None:
            return None
        traces.repeat(found.traces)
        return found.run

    watch = MemoryWatch(
        forward=traces.forward,
        backward=traces.backward,
        before_backward=traces.trace_input_grad,
        known=known_run,
    )
    memory = run_for_memory(run, LiveBytes(), watch)
    found = KnownRun(backward=memory.backward, drawing=memory.drawing, put_aside=memory.put_aside)
    # The first of its kind: later layers that are alike repeat this one.
    known.setdefault(key, _Known(traces=traces, run=found))
    written = dict(zip(layer.writes, memory.written, strict=True))
    ledger.add(layer, memory.kept, run.reads, written, weight_keys(run), memory.put_aside.reads)
    return written, traces, memory


def autograd_graph(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Hashable:
    """A key of an autograd graph: graphs with equal keys and equal forwards run the same operations in the backward.

    Its first part has the shapes, strides and dtypes of inputs and outputs, and the node where each output gets its
    gradient (-1: none). Its second part has the nodes in the order in which they are found: each with its kind and the
    nodes to which it passes gradients; a leaf with the number of its input, or the shape and dtype of its parameter.

    >>> x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> (_, starts), nodes = autograd_graph([x * weight], [x])
    >>> starts, nodes
    ((0,), (('MulBackward0', ((1, 0), (2, 0))), 0, (torch.Size([2]), torch.float32)))
    """
    number_of_input = {id(tensor): number for number, tensor in enumerate(inputs)}
    numbers: dict[Any, int] = {}
    starts = []
    for tensor in outputs:
        node = get_gradient_edge(tensor).node if tensor.requires_grad else None
        starts.append(-1 if node is None else numbers.setdefault(node, len(numbers)))
    nodes = list(numbers)
    found: list[Hashable] = []
    for node in nodes:  # grows while it is read
        if hasattr(node, "variable"):  # the node that adds to a leaf's gradient
            leaf = node.variable
            found.append(number_of_input.get(id(leaf), (leaf.shape, leaf.dtype)))
            continue
        edges = []
        for other, place in node.next_functions:
            if other is not None and other not in numbers:
                numbers[other] = len(numbers)
                nodes.append(other)
            edges.append((-1 if other is None else numbers[other], place))
        found.append((node.name(), tuple(edges)))
    layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (*inputs, *outputs))
    return (layouts, tuple(starts)), tuple(found)

"""The glue between the calls of a cut model's modules, and the layers' `run`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import active_fake_mode
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from diffusionpipe.models.cut.exporting import Exported
from diffusionpipe.models.graphs.graph import Layer, attribute

CALL = torch.ops.diffusionpipe.call_module.default
"""The operator that represents a call of a submodule in a trace."""


def closure(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and all nodes that they depend on, each after those that it reads."""
    order: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node not in order:
            for argument in node.all_input_nodes:
                visit(argument)
            order[node] = None

    for node in nodes:
        visit(node)
    return list(order)


class ConstantTables:
    """The values of a trace that depend on no input, computed once for each device. Mutable: layers add them."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self._kept: dict[tuple[object, ...], Any] = {}
        self._fakes: dict[tuple[object, ...], Any] = {}
        self._mode: object = None
        """The fake tensor mode for which `_fakes` were computed."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that have been computed so far, on any device, and the fake ones of the last fake mode."""
        return (value for value in (*self._kept.values(), *self._fakes.values()) if isinstance(value, Tensor))

    def value(self, node: fx.Node, root: nn.Module, device: torch.device) -> Any:
        """The value of a node on the device; at its first use it is computed from the buffers as they are now."""
        owned = self._exported.owned
        nodes = closure([node])
        buffers = [attribute(root, owned[n.name]) for n in nodes if n.name in owned]
        # A buffer that was moved or cast gives another value.
        key = (node, device, *((id(b), b.dtype) for b in buffers if isinstance(b, Tensor)))
        mode = active_fake_mode()
        if mode is None:
            if key not in self._kept:
                found = self._computed(nodes, root, device)
                if not isinstance(found, Tensor):
                    return found  # a number: it costs nothing to compute again
                self._kept[key] = found.clone()  # a view would keep what it is a view of
            return self._kept[key]
        if self._mode is not mode:
            self._mode, self._fakes = mode, {}
        if key not in self._fakes:
            # It is there before the layer runs: what counts the layer's operations and memory does not see it made.
            with _disable_current_modes(), mode:
                self._fakes[key] = self._computed(nodes, root, device)
        return self._fakes[key]

    def _computed(self, nodes: Sequence[fx.Node], root: nn.Module, device: torch.device) -> Any:
        """The value of the last of these nodes, which are in order and include all that it depends on."""
        values: dict[fx.Node, Any] = {}
        place = _Place(self._exported, root, device)
        for each in nodes:
            values[each] = _value(place, each, values)
        return values[nodes[-1]]


def tables_of(layers: Iterable[Layer]) -> Iterator[Tensor]:
    """The tensors in the `ConstantTables` of these layers, which they have computed once and keep for all samples."""
    found: list[object] = [getattr(layer.run, "tables", None) for layer in layers]
    for tables in {id(one): one for one in found if isinstance(one, ConstantTables)}.values():
        yield from tables.tensors


@dataclass(frozen=True, slots=True)
class _Place:
    """The module, the device and the batch size with which the values of nodes are computed."""

    exported: Exported
    """The trace to which the nodes belong."""
    root: nn.Module
    """The model, which holds parameters, buffers and submodules."""
    device: torch.device
    """The device on which values are computed."""
    batch: int = 0
    """The number of samples; 0 for tables, which do not depend on it."""


def _value(place: _Place, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The value of a node, computed from its arguments, whose values are in `values`."""
    if node.op == "placeholder":
        if node.name in place.exported.constants:
            return place.exported.constants[node.name].to(place.device)
        return attribute(place.root, place.exported.owned[node.name])
    if node.op == "get_attr":
        return attribute(place.exported.graph_module, str(node.target))
    if node.target is CALL:
        given = [values[n] for n in node.args[0]]  # type: ignore[union-attr, index]
        return place.exported.call(node).run(place.root, given, place.batch)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
    # The trace holds the device of its examples, and the layer runs on another.
    arguments, named = map_aggregate((arguments, named), lambda a: place.device if isinstance(a, torch.device) else a)
    return function(*arguments, **named)


@dataclass(frozen=True, slots=True)
class GluedRun:
    """The function `run` of a layer that was cut from a forward: its operations and submodules' calls, in order."""

    exported: Exported
    """The trace from which the layer was cut."""
    steps: tuple[fx.Node, ...]
    """The nodes that it computes, in order."""
    from_tables: frozenset[fx.Node]
    """The steps whose values are in `tables`."""
    batches: frozenset[fx.Node]
    """The steps whose value is the number of samples."""
    reads: tuple[fx.Node, ...]
    """The nodes whose values are the tensors that it reads, in order."""
    writes: tuple[fx.Node, ...]
    """The nodes whose values are the tensors that it returns, in order."""
    passed_on: frozenset[fx.Node]
    """The writes that only calls of modules read, so that their strides are not made contiguous."""
    tables: ConstantTables
    """The values that depend on no input, common to all layers of the trace."""

    def __deepcopy__(self, memo: object) -> "GluedRun":
        """The same object: it names modules and holds none of them, so copies of a model can share it."""
        return self

    def __call__(self, root: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the layer writes, in the order of `writes`; `tensors`: in the order of `reads`."""
        values: dict[fx.Node, Any] = dict(zip(self.reads, tensors, strict=True))
        place = _Place(self.exported, root, tensors[0].device, len(tensors[0]))
        for node in self.steps:
            if node in self.from_tables:
                values[node] = self.tables.value(node, root, place.device)
            elif node in self.batches:
                values[node] = place.batch
            else:
                values[node] = _value(place, node, values)
        written = [
            values[node] if node in self.passed_on and _has_dense_samples(values[node]) else values[node].contiguous()
            for node in self.writes
        ]
        if any(tensor.requires_grad for tensor in written):
            # All of a layer's values have gradients, or none: so its description says.
            written = [_with_gradient(tensor) for tensor in written]
        return tuple(written)


def _has_dense_samples(tensor: Tensor) -> bool:
    """Whether each sample of the tensor is contiguous in memory, even where the whole tensor is not."""
    size = 1
    for length, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return tensor.stride()[0] >= size


def _with_gradient(tensor: Tensor) -> Tensor:
    """The tensor if it needs a gradient or has no floats; else a detached leaf, whose gradient is never read."""
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_()

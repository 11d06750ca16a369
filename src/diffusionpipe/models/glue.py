"""What runs between the calls of a cut model's modules, and the layers' `run`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from diffusionpipe.models.exporting import Exported
from diffusionpipe.models.graph import attribute

CALL = torch.ops.diffusionpipe.call_module.default
"""The operator of a module's call in a trace."""


def closure(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and all that they depend on, each after what it reads."""
    order: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node not in order:
            for argument in node.all_input_nodes:
                visit(argument)
            order[node] = None

    for node in nodes:
        visit(node)
    return list(order)


class Tables:
    """Values that depend on no input, kept for each device."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self._kept: dict[tuple[object, ...], Any] = {}

    def value(self, node: fx.Node, root: nn.Module, device: torch.device) -> Any:
        """The value on the device, computed at its first use from the buffers as they are now."""
        from torch._subclasses.fake_tensor import FakeTensor

        owned = self._exported.owned
        nodes = closure([node])
        buffers = [attribute(root, owned[n.name]) for n in nodes if n.name in owned]
        key = (node, device, *((id(b), b.dtype) for b in buffers if isinstance(b, Tensor)))
        if key in self._kept:
            return self._kept[key]
        values: dict[fx.Node, Any] = {}
        place = _Place(self._exported, root, device)
        for each in nodes:
            values[each] = _value(place, each, values)
        found = values[node]
        if isinstance(found, Tensor) and not isinstance(found, FakeTensor):
            found = self._kept[key] = found.clone()  # a view would keep what it is a view of
        return found


@dataclass(frozen=True, slots=True)
class _Place:
    """Where values are computed."""

    exported: Exported
    root: nn.Module
    device: torch.device
    batch: int = 0
    """The number of samples; 0 for tables, which do not depend on it."""


def _value(place: _Place, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The value of a node whose arguments are in `values`."""
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
    arguments, named = map_aggregate((arguments, named), lambda a: place.device if isinstance(a, torch.device) else a)
    return function(*arguments, **named)


@dataclass(frozen=True, slots=True)
class Run:
    """A layer's `run`: its steps in order."""

    exported: Exported
    steps: tuple[fx.Node, ...]
    from_tables: frozenset[fx.Node]
    batches: frozenset[fx.Node]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    tables: Tables

    def __call__(self, root: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors in the order of `writes`."""
        values: dict[fx.Node, Any] = dict(zip(self.reads, tensors, strict=True))
        place = _Place(self.exported, root, tensors[0].device, len(tensors[0]))
        for node in self.steps:
            if node in self.from_tables:
                values[node] = self.tables.value(node, root, place.device)
            elif node in self.batches:
                values[node] = place.batch
            else:
                values[node] = _value(place, node, values)
        written = [values[node].contiguous() for node in self.writes]
        if any(tensor.requires_grad for tensor in written):
            # All of a layer's values have gradients, or none: so its description says.
            written = [_with_gradient(tensor) for tensor in written]
        return tuple(written)


def _with_gradient(tensor: Tensor) -> Tensor:
    """The tensor; of one that a trained layer made of frozen values alone, a leaf whose gradient nobody reads."""
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_()

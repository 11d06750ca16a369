"""Contexts in which other tensors replace a module's parameters and buffers.

A profile needs weights of the right shape, not the right weights: random ones for one layer at a time, so that a model
far larger than the device can be measured on it, and fake ones where only operations are counted.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.models.graphs.graph import Layer, LayerGraph, own_parameters

Substitute = Callable[[str, Tensor], Tensor]
"""A function (name within its module, tensor) -> the tensor that replaces it."""


@contextmanager
def substituted(components: Iterable[nn.Module], replaced: set[int], substitute: Substitute) -> Iterator[None]:
    """A context in which `substitute(name, tensor)` replaces each parameter or buffer whose id is in `replaced`.

    Tied tensors stay tied; whether a parameter is trained stays as it was. The originals are back at the end.
    """
    # nn.Module has no public way to hold a tensor of another device in a parameter's place for a while.
    tables: list[dict[str, Any]] = [
        table
        for component in components
        for module in component.modules()
        for table in (module._parameters, module._buffers)
    ]
    originals = [dict(table) for table in tables]
    substitutes: dict[int, Tensor] = {}
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in replaced:
                    if id(tensor) not in substitutes:
                        value = substitute(name, tensor)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        substitutes[id(tensor)] = (
                            nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
                        )
                    table[name] = substitutes[id(tensor)]
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)


@contextmanager
def buffers_on(graph: LayerGraph, device: torch.device) -> Iterator[None]:
    """A context in which all buffers are on the device, floats in their component's dtype, as in training."""
    dtypes: dict[int, torch.dtype | None] = {}
    for component in graph.components.values():
        dtype = next((p.dtype for p in component.parameters()), None)
        dtypes |= {id(buffer): dtype for buffer in component.buffers()}

    def move(name: str, buffer: Tensor) -> Tensor:
        return buffer.to(device, dtypes[id(buffer)] if buffer.is_floating_point() else None)

    with substituted(graph.components.values(), set(dtypes), move):
        yield


@contextmanager
def weights_on(graph: LayerGraph, layer: Layer, device: torch.device) -> Iterator[None]:
    """A context in which random parameters on the device replace a layer's parameters that are not there."""
    component = graph.components[layer.component]
    missing = {id(p) for p in own_parameters(layer, component) if p.device.type != device.type}
    generator = torch.Generator(device=device).manual_seed(0)

    def fill(name: str, parameter: Tensor) -> Tensor:
        if parameter.ndim < 2:
            constant = 1.0 if name == "weight" else 0.01  # scales of norms and biases
            return torch.full(parameter.shape, constant, dtype=parameter.dtype, device=device)
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if not parameter.dtype.is_floating_point:  # codes of stored weights: every number is one
            return values.random_(generator=generator)
        bound = (3.0 / parameter[0].numel()) ** 0.5  # keeps the size of what passes through
        if parameter.dtype.itemsize == 1:  # torch draws no float8
            values = torch.empty(parameter.shape, device=device)
        return values.uniform_(-bound, bound, generator=generator).to(parameter.dtype)

    with substituted((component,), missing, fill):
        yield


@contextmanager
def fake_weights(graph: LayerGraph) -> Iterator[None]:
    """A context in which all parameters and buffers are fake tensors; enter it under a fake tensor mode."""
    tensors = {id(t) for c in graph.components.values() for t in (*c.parameters(), *c.buffers())}

    def fake(name: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    with substituted(graph.components.values(), tensors, fake):
        yield

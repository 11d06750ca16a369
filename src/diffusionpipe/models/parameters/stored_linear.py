"""Linear layers whose frozen weight is stored in one byte or four bits a number, and widened where it is used.

    F   y = x wide(codes, scales)^T + bias      the wide weight is gone when the product has run
    I   dx = dy wide(codes, scales)             widened again: only codes and scales are kept, which are there anyway
    W   none: a stored weight is frozen

Codes and scales are plain parameters, so shards, host memory, profiles and plans treat them as any other parameter,
with their own bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from diffusionpipe.costs.forms import Form, shapes
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.parameters.forms import encode, wide
from diffusionpipe.models.parameters.int8_product import int8_product


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """Dtype, device and shape of a weight that is stored as codes; no tensor can be computed with it."""

    dtype: torch.dtype
    """The dtype of the layer's other weights."""
    device: torch.device
    """The device of the codes."""
    shape: torch.Size
    """The shape of the wide weight."""


class StoredLinear(nn.Linear):
    """A frozen linear layer that has narrow `codes` and `scales` in place of its weight."""

    def __init__(self, form: Form, like: nn.Linear) -> None:
        """Make a layer of the shape of `like`, with its bias; codes and scales are empty, on its weight's device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = like.in_features, like.out_features, form
        self.multiplies_integers = False
        """Whether a forward multiplies integers (see `int8_product`); for the form int8 alone."""
        device, (codes, scales) = like.weight.device, shapes(form, like.out_features, like.in_features)
        self._dtype = like.weight.dtype
        # Codes come last: libraries ask the first parameter of a module in which dtype the module computes.
        self.register_parameter("bias", like.bias)
        self.scales = nn.Parameter(torch.empty(scales, dtype=torch.float32, device=device), requires_grad=False)
        self.codes = nn.Parameter(torch.empty(codes, dtype=torch.uint8, device=device), requires_grad=False)

    @property
    def weight(self) -> WeightFacts:  # type: ignore[override]  # nn.Linear declares a tensor, which is not stored
        """Dtype, device and shape of the weight, for libraries that ask; it has no values."""
        shape = torch.Size((self.out_features, self.in_features))
        return WeightFacts(dtype=self._dtype, device=self.codes.device, shape=shape)

    def encoded(self, weight: Tensor) -> dict[str, Tensor]:
        """{"codes": ..., "scales": ...}: the tensors that store a weight (outputs, inputs) in the layer's form."""
        codes, scales = encode(self.form, weight.detach())
        return {"codes": codes, "scales": scales}

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The layer's weight from its codes, (outputs, inputs), in `dtype`."""
        return wide(self.form, self.codes, self.scales, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer's result with the wide weight, in the dtype of autocast or else of `x`."""
        y: Tensor = _Product.apply(as_autocast(x), self)
        return y

    def extra_repr(self) -> str:
        """The layer's sizes and form as a text, for the printed model."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}, form={self.form}"


def as_autocast(x: Tensor) -> Tensor:
    """The tensor in autocast's dtype if autocast is on for its device and it is not float64; else as it is."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _Product(Function):
    """The product x w^T (and the bias) of a stored layer, for autograd.

    Between forward and backward it keeps only the layer, whose codes and scales are there anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: StoredLinear) -> Tensor:
        ctx.layer, ctx.dtype, weight = layer, x.dtype, layer.wide(x.dtype)
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        if layer.multiplies_integers:
            y = int8_product(x, layer.codes, layer.scales, weight)
            return y if bias is None else y + bias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] @ ctx.layer.wide(ctx.dtype), None


def store(graph: LayerGraph, form_of: Callable[[str], Form | None], *, multiplies_integers: bool = False) -> None:
    """Replace the frozen linear layers of a graph's components by stored ones, with codes in place of weights.

    Real weights are encoded; meta weights get their values later. `form_of(component)`: the form of its layers; None to
    leave them as they are. Adapters have to be added before this call. A layer stays as it is if it is trained, if its
    forward is not torch's own, or if its weight is read by anything but its forward. `multiplies_integers`: layers in
    int8 multiply integers (`int8_product`).
    """
    for name, component in graph.components.items():
        form = form_of(name)
        if form is not None:
            for parent, key, layer in list(_storable(graph, name, component)):
                stored = _stored(form, layer)
                stored.multiplies_integers = multiplies_integers and form is Form.INT8
                setattr(parent, key, stored)


def _stored(form: Form, layer: nn.Linear) -> StoredLinear:
    found = StoredLinear(form, layer)
    if not layer.weight.is_meta:
        for name, value in found.encoded(layer.weight).items():
            setattr(found, name, nn.Parameter(value, requires_grad=False))
    return found


def _storable(graph: LayerGraph, name: str, component: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent module, name in it, layer) of each frozen linear layer of a component that can be stored narrow.

    Only its own forward reads its weight. `name`: the component's name.
    """
    # A list, because the caller replaces layers while it walks.
    for _, parent, key, layer in list(layers_read_alone(graph, name, component, (nn.Linear,))):
        if not any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
            assert isinstance(layer, nn.Linear)
            yield parent, key, layer


def layers_read_alone(
    graph: LayerGraph, name: str, component: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent module, name in it, layer) of layers of the classes `kinds` whose weight only their forward reads.

    `name`: the name of the component.
    """
    read = {part for layer in graph.layers if layer.component == name for part in layer.modules}
    # A tied weight has several owners and cannot be replaced in one of them alone.
    owners: dict[int, int] = {}
    for _, parameter in component.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for path, parent in component.named_modules():
        if isinstance(parent, nn.MultiheadAttention):  # it reads the weights of its part itself
            continue
        for key, layer in parent.named_children():
            own = f"{path}.{key}" if path else key
            kind = next((kind for kind in kinds if isinstance(layer, kind)), None)
            if (
                kind is not None
                and type(layer).forward is kind.forward
                and owners[id(layer.weight)] == 1
                and f"{own}.weight" not in read
            ):
                yield own, parent, key, layer


def stored_layers(component: nn.Module) -> dict[str, StoredLinear]:
    """Name in the component -> layer, for its layers that are stored narrow."""
    return {name: module for name, module in component.named_modules() if isinstance(module, StoredLinear)}


def parts_of(name: str, component: nn.Module) -> tuple[str, ...]:
    """The canonical names of all codes and scales in a component; `name`: the component's name."""
    return tuple(f"{name}.{path}.{part}" for path in stored_layers(component) for part in ("codes", "scales"))


def scales_of(component: nn.Module) -> tuple[str, ...]:
    """The names, in the component, of the scales of its stored layers, which stay float32 in any arithmetic."""
    return tuple(f"{name}.scales" for name in stored_layers(component))


def wide_weights(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredLinear]) -> dict[str, Tensor]:
    """Name -> tensor, with a weight on the meta device in place of a stored layer's codes and scales.

    These are the names in a component's files. `tensors`: of the component, by name. `stored`: see `stored_layers`.
    """
    found = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if path not in stored or last == "bias":
            found[name] = tensor
        elif last == "codes":
            found[f"{path}.weight"] = torch.empty(stored[path].weight.shape, device="meta")
    return found

"""Linear layers and convolutions of narrow exports, which are drawn from and never trained.

    w8      the form int8      weights widened where they are used
    w8a8    the form int8      inputs rounded to 8 bits too, by one scale of the layer; integers are multiplied
    w4      the form nf4       weights widened where they are used

A weight of any number of dimensions is a matrix of its outputs and all else. `StoredLinear` has the same forms for
frozen layers of models in training; here the files hold codes and scales under their own names.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from diffusionpipe.costs.forms import Form, shapes
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.parameters.forms import encode, wide
from diffusionpipe.models.parameters.int8_product import integer_product
from diffusionpipe.models.parameters.stored import StoredWeights, opened
from diffusionpipe.models.parameters.stored_linear import WeightFacts, as_autocast, layers_read_alone

METHOD = "diffusionpipe"
"""The `quant_method` in the configuration of a component that is exported narrow."""
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_LARGEST = 127


class Width(StrEnum):
    """The number of bits of weights ("w") and of inputs ("a") of layers in a narrow export."""

    W8 = "w8"
    """8-bit weights."""
    W8A8 = "w8a8"
    """8-bit weights and inputs."""
    W4 = "w4"
    """4-bit weights."""

    @property
    def form(self) -> Form:
        """The form in which weights are stored: nf4 for `W4`, else int8."""
        return Form.NF4 if self is Width.W4 else Form.INT8

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of layers are rounded to 8 bits too."""
        return self is Width.W8A8


class ExportedLayer(nn.Module):
    """A linear layer or convolution of a narrow export: it has `codes` and `scales` in place of its weight."""

    def __init__(self, like: nn.Module, width: Width) -> None:
        """Make a layer of the kind and sizes of `like`, with its bias; codes and scales are empty."""
        super().__init__()
        like_any: Any = like
        weight: Tensor = like_any.weight
        self.form, self._shape, self._dtype = width.form, weight.shape, weight.dtype
        self._strides: Mapping[str, Any] = {}
        if not isinstance(like, nn.Linear):
            names = ("stride", "padding", "dilation", "groups")
            self._strides = {name: getattr(like_any, name) for name in names}
        codes, scales = shapes(self.form, *self._matrix)
        device = weight.device
        # Codes come last: libraries ask the first parameter of a module in which dtype the module computes.
        self.register_parameter("bias", like_any.bias)
        # Flagged as the weight was: by its flags a description finds the layers of the denoiser.
        self.scales = nn.Parameter(torch.empty(scales, device=device), requires_grad=weight.requires_grad)
        rounds = width.rounds_inputs
        self.input_scale = (
            nn.Parameter(torch.empty((), device=device), requires_grad=weight.requires_grad) if rounds else None
        )
        self.codes = nn.Parameter(torch.empty(codes, dtype=torch.uint8, device=device), requires_grad=False)

    @property
    def weight(self) -> WeightFacts:
        """Dtype, device and shape of the weight, for libraries that ask; it has no values."""
        return WeightFacts(dtype=self._dtype, device=self.codes.device, shape=self._shape)

    @property
    def _matrix(self) -> tuple[int, int]:
        return self._shape[0], prod(self._shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """The result of the linear layer or convolution, in the dtype of autocast or else of `x`."""
        x = as_autocast(x)
        own: Any = self.bias
        bias: Tensor | None = None if own is None else own.to(x.dtype)
        if self.input_scale is None:
            return self._wide(x, bias)
        numbers = (x.float() / self.input_scale).round_().clamp_(-_LARGEST, _LARGEST)
        found = self._integers(numbers)
        if found is None:
            return self._wide((numbers * self.input_scale).to(x.dtype), bias)
        found = (found * self.input_scale).to(x.dtype)
        if bias is None:
            return found
        # A convolution's bias belongs to dimension 1.
        return found + (bias if not self._strides else bias.view(-1, 1, 1))

    def _wide(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = wide(self.form, self.codes, self.scales, self._matrix, x.dtype).view(self._shape)
        if not self._strides:
            return functional.linear(x, weight, bias)
        return _CONVOLUTIONS[len(self._shape) - 3](x, weight, bias, **self._strides)

    def _integers(self, numbers: Tensor) -> Tensor | None:
        """The result of the layer in float32 for inputs that are whole numbers, without input scale and bias.

        None for convolutions in groups, of one dimension and of three, which this product cannot compute.
        """
        if not self._strides:
            rows = numbers.reshape(-1, numbers.shape[-1]).to(torch.int8)
            product: Tensor = torch.ops.diffusionpipe.exported_product(rows, self.codes, self.scales)
            return product.view(*numbers.shape[:-1], len(product[0]))
        if len(self._shape) != 4 or self._strides["groups"] != 1 or isinstance(self._strides["padding"], str):
            return None
        # The size of a convolution's result, as torch's documentation of Conv2d states it.
        sides = [
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, pad, dilation, stride in zip(
                numbers.shape[2:],
                self._shape[2:],
                self._strides["padding"],
                self._strides["dilation"],
                self._strides["stride"],
                strict=True,
            )
        ]
        geometry = {name: self._strides[name] for name in ("dilation", "padding", "stride")}
        found = []
        for sample in numbers.split(1):  # unfolded, a sample is as many times larger as the kernel has places
            columns = functional.unfold(sample, tuple(self._shape[2:]), **geometry)[0]  # (inputs, places)
            rows = columns.t().to(torch.int8)
            # (places, outputs)
            product = torch.ops.diffusionpipe.exported_product(rows, self.codes, self.scales)
            found.append(product.t().reshape(1, self._shape[0], *sides))
        return torch.cat(found)

    def extra_repr(self) -> str:
        """The shape and the form of the weight as a text, for the printed model."""
        return f"{tuple(self._shape)}, form={self.form}, rounds_inputs={self.input_scale is not None}"


@torch.library.custom_op("diffusionpipe::exported_product", mutates_args=())
def _product(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return integer_product(rows, codes, scales)


@_product.register_fake
def _(rows: Tensor, codes: Tensor, _scales: Tensor) -> Tensor:
    return rows.new_empty((len(rows), len(codes)), dtype=torch.float32)


@register_flop_formula(torch.ops.diffusionpipe.exported_product)
def _flops(rows: Any, codes: Any, *_: Any, **__: Any) -> int:
    """The number of operations of a product, from the shapes of its rows and codes."""
    return 2 * int(rows[0]) * int(rows[1]) * int(codes[0])


def exportable(graph: LayerGraph, name: str) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Name -> (parent module, name in it, layer) of the layers of a component that a narrow export stores narrow.

    `name`: the name of the component. Convolutions that pad with anything but zeros stay wide.
    """
    found = layers_read_alone(graph, name, graph.components[name], KINDS)
    return {
        path: (parent, key, layer)
        for path, parent, key, layer in found
        if getattr(layer, "padding_mode", "zeros") == "zeros"
    }


def encoded(weight: Tensor, width: Width) -> dict[str, Tensor]:
    """{"codes": ..., "scales": ...}: the tensors that store a weight, of any number of dimensions, in this width."""
    codes, scales = encode(width.form, weight.detach().flatten(1))
    return {"codes": codes, "scales": scales}


def width_of(config: Mapping[str, Any], source: Path) -> Width | None:
    """The width of a component that was exported narrow, from its configuration; None for other components.

    `source`: the configuration's file, which errors name. Raises ModelError for a width that this version cannot read.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or stated.get("quant_method") != METHOD:
        return None
    try:
        return Width(str(stated.get("width")))
    except ValueError:
        raise ModelError(
            f"{source} is a narrow export of the width {stated.get('width')!r}; known: {', '.join(Width)}; draw it "
            "with the version that wrote it"
        ) from None


def put_exported_layers(graph: LayerGraph, name: str, width: Width, source: StoredWeights) -> None:
    """Replace layers of a component by empty `ExportedLayer`s where its files hold codes and scales for them.

    `name`: the name of the component. `source`: its files.

    Raises ModelError for a file that cannot be read, or that belongs to another model.
    """
    layers = exportable(graph, name)
    for path in _narrow_in(source):
        if path not in layers:
            raise ModelError(f"{source.source}: {path} is stored narrow, and the model has no such layer")
        parent, key, layer = layers[path]
        setattr(parent, key, ExportedLayer(layer, width))


def _narrow_in(source: StoredWeights) -> Iterator[str]:
    for file in source.files:
        with opened(file) as tensors:
            yield from (name.removesuffix(".codes") for name in tensors.names() if name.endswith(".codes"))


def observed(layers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, float]:
    """Call `run`; returns name -> largest magnitude of the layer's inputs meanwhile, 0 if the layer did not run."""
    largest = dict.fromkeys(layers, 0.0)

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = max(largest[name], float(inputs[0].detach().abs().amax()))

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return largest


def input_scale(largest: float) -> Tensor:
    """The scale, (), by which a layer's inputs are divided to become 8-bit integers; 1 if `largest` is 0.

    `largest`: the largest magnitude of its inputs that was seen.
    """
    return torch.tensor(largest / _LARGEST if largest > 0 else 1.0)

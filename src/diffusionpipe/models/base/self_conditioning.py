"""Self-conditioning: the denoiser also reads its own estimate of the clean sample, made by a pass before.

    pass before   noisy, zeros            ─> denoiser ─> prediction ─> estimate        without gradients
    pass          noisy, estimate x mask  ─> denoiser ─> prediction ─> loss

Chen, Zhang, Hinton, "Analog Bits", ICLR 2023, https://arxiv.org/abs/2208.04202, section 3.2: with probability p the
pass before is made, else the denoiser reads zeros. Here the conditioned samples are at fixed positions of every batch
(`is_conditioned`), so a step always takes the same time; the order of the data is random, so each sample still meets
both cases. The estimate is concatenated to the noisy samples along their channels. The first convolution therefore has
twice the inputs. Of a plain model the new half of its weights is zero: at first it predicts as it did without.

The layers stay the family's. Those that read the noisy samples also read "estimate" and "conditioned", the mask, and
the layer of the loss also writes "estimate" (`Backbone.estimate`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, attribute
from diffusionpipe.models.objectives.objective import Objective

ESTIMATE = "estimate"
CONDITIONED = "conditioned"
"""The raw input that says for which samples the estimate counts: 1 or 0."""


def is_conditioned(position: int, share: Fraction) -> bool:
    """Whether the sample at this position of a batch reads its estimate; the share of those is even over the batch.

    >>> [position for position in range(8) if is_conditioned(position, Fraction(1, 2))]
    [1, 3, 5, 7]
    >>> [position for position in range(8) if is_conditioned(position, Fraction(3, 4))]
    [1, 2, 3, 5, 6, 7]
    """
    return (position + 1) * share // 1 > position * share // 1


def self_conditioned(graph: LayerGraph, component: str, convolution: str | None) -> LayerGraph:
    """The graph of a plain denoiser with self-conditioning; widens its first convolution in place.

    Args:
        graph: of one backbone, which reads its noisy samples in the component `component` alone.
        component: the denoiser.
        convolution: the name of the convolution below it; None: it has none that could be widened.

    Raises:
        ModelError: the denoiser cannot be widened.
    """
    if convolution is None:
        raise ModelError(
            f"objective.self_conditioning: {component} has no first convolution that could read an estimate beside the "
            "samples; supported are Stable Diffusion 1, 2, XL, and DiT: remove self_conditioning"
        )
    (backbone,) = graph.backbones
    objective, noise = graph.components["objective"], next(spec for spec in graph.inputs if spec.name == "noise")
    assert isinstance(objective, Objective)
    widen(graph.components[component], convolution)
    layers = []
    for layer in graph.layers:
        if layer.component == component and backbone.noisy in layer.reads:
            layer = _conditioned(layer, backbone.noisy)
        elif backbone.loss in layer.writes:
            reads = (*layer.reads, str(backbone.prediction), backbone.noisy, backbone.timesteps)
            layer = replace(layer, reads=reads, writes=(*layer.writes, ESTIMATE), run=_Estimating(layer.run))
        layers.append(layer)
    return replace(
        graph,
        layers=tuple(layers),
        inputs=(*graph.inputs, TensorSpec(name=CONDITIONED, shape=())),
        backbones=(replace(backbone, estimate=ESTIMATE, self_conditioning=objective.settings.self_conditioning),),
        fed_back=(TensorSpec(name=ESTIMATE, shape=noise.shape, dtype=noise.dtype),),
        widened=frozenset({f"{component}.{convolution}.weight"}),
    )


def plain_config(config: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """The configuration of a denoiser that may be widened already, as it was for samples of `channels` channels."""
    return {**config, "in_channels": channels} if config.get("in_channels") == 2 * channels else dict(config)


def widened_config(module: Any) -> dict[str, Any]:
    """The changes in the configuration of a plain denoiser that is widened. Its outputs stay as many as they are."""
    config = module.config
    return {"in_channels": 2 * config.in_channels, "out_channels": config.out_channels or config.in_channels}


def widen(module: nn.Module, name: str) -> None:
    """Gives a convolution twice the inputs, in place; the weights of the new half are zero.

    Raises:
        ModelError: there is no plain convolution of that name.
    """
    old = attribute(module, name)
    if type(old) is not nn.Conv2d or old.groups != 1 or old.padding_mode != "zeros":
        raise ModelError(f"self_conditioning widens {name}, a plain convolution; here it is a {type(old).__name__}")
    with torch.device("meta"):
        new = TwoHalves(
            2 * old.in_channels,
            old.out_channels,
            old.kernel_size,  # type: ignore[arg-type]  # torch declares it wider than it takes it
            old.stride,  # type: ignore[arg-type]
            old.padding,  # type: ignore[arg-type]
            old.dilation,  # type: ignore[arg-type]
            bias=old.bias is not None,
        )
    weight = torch.cat([old.weight.detach(), torch.zeros_like(old.weight)], dim=1)  # (C_out, 2 C_in, K, K)
    new.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    new.train(old.training)
    path, _, own = name.rpartition(".")
    parent = attribute(module, path) if path else module
    setattr(parent, own, new)


class TwoHalves(nn.Conv2d):
    """A convolution that adds the results of both halves of its inputs.

    Where the weights of the second half are zero, the result is bit for bit equal to a convolution of the first half
    alone. One convolution of all inputs may round otherwise, because libraries choose its algorithm by the sizes.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(B, 2C, H, W) to (B, C_out, H', W')."""
        here, there = self.weight.chunk(2, dim=1)
        first, second = input.chunk(2, dim=1)
        first = self._conv_forward(first, here, self.bias)  # (B, C_out, H', W')
        result: Tensor = first + self._conv_forward(second, there, None)
        return result


def _conditioned(layer: Layer, noisy: str) -> Layer:
    run = _Conditioned(layer.run, layer.reads.index(noisy))
    return replace(layer, reads=(*layer.reads, ESTIMATE, CONDITIONED), run=run)


@dataclass(frozen=True, slots=True)
class _Conditioned:
    """A layer that reads the noisy samples with the estimates after their channels."""

    run: Any
    place: int
    """Position of the noisy samples among the tensors that the layer reads."""

    def __call__(self, component: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        *own, estimate, mask = tensors
        noisy = own[self.place]  # (B, C, ...)
        masked = estimate * mask.to(estimate.dtype).reshape(-1, *[1] * (estimate.ndim - 1))
        own[self.place] = torch.cat([noisy, masked.to(noisy.dtype)], dim=1)  # (B, 2C, ...)
        written: tuple[Tensor, ...] = self.run(component, *own)
        return written


@dataclass(frozen=True, slots=True)
class _Estimating:
    """The layer of the loss, which also writes the estimate."""

    run: Any

    def __call__(self, objective: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(objective, Objective)
        *own, prediction, noisy, timesteps = tensors
        return (*self.run(objective, *own), objective.estimate(prediction, noisy, timesteps))

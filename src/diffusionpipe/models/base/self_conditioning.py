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
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.graphs.widening import widen
from diffusionpipe.models.objectives.objective import Objective

ESTIMATE = "estimate"
CONDITIONED = "conditioned"
"""The raw input that is 1 for samples that read their estimate, and 0 for samples that read zeros."""


def is_conditioned(position: int, share: Fraction) -> bool:
    """Whether the sample at this position of a batch reads its own estimate, as `share` of all do, spread evenly.

    >>> [position for position in range(8) if is_conditioned(position, Fraction(1, 2))]
    [1, 3, 5, 7]
    >>> [position for position in range(8) if is_conditioned(position, Fraction(3, 4))]
    [1, 2, 3, 5, 6, 7]
    """
    # A fraction is exact, so each batch has the same number of conditioned samples.
    return (position + 1) * share // 1 > position * share // 1


def self_conditioned(graph: LayerGraph, component: str, convolution: str | None) -> LayerGraph:
    """The graph of a plain denoiser, changed to self-conditioning; widens its first convolution in place.

    Args:
        graph: the graph of one backbone, which reads its noisy samples in the component `component` alone.
        component: the name of the denoiser.
        convolution: the name of this convolution below the component; None: there is none to widen.

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
    widen(graph.components[component], convolution, noise.shape[0])
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
    """A copy of a denoiser's configuration, without the input channels for its own estimate if it has them.

    `channels`: the number of channels of a sample; a denoiser that reads its estimate has twice as many inputs.
    """
    return {**config, "in_channels": channels} if config.get("in_channels") == 2 * channels else dict(config)


def widened_config(module: Any, more: int) -> dict[str, Any]:
    """The configuration fields in_channels, increased by `more`, and out_channels, unchanged, of a plain denoiser."""
    config = module.config
    return {"in_channels": config.in_channels + more, "out_channels": config.out_channels or config.in_channels}


def _conditioned(layer: Layer, noisy: str) -> Layer:
    run = _Conditioned(layer.run, layer.reads.index(noisy))
    return replace(layer, reads=(*layer.reads, ESTIMATE, CONDITIONED), run=run)


@dataclass(frozen=True, slots=True)
class _Conditioned:
    """The `run` of a layer that also reads the masked estimates and joins them to the noisy samples' channels."""

    run: Any
    """The `run` of the layer without estimates."""
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
    """The `run` of the loss's layer, which also writes the estimate of the clean samples."""

    run: Any
    """The `run` of the loss alone."""

    def __call__(self, objective: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(objective, Objective)
        *own, prediction, noisy, timesteps = tensors
        return (*self.run(objective, *own), objective.estimate(prediction, noisy, timesteps))

"""Coordinates: a denoiser of patches reads where each latent lies in the whole picture.

    noisy patch        (C, h, w) ─┬─ first convolution, widened by two inputs with weights of zero ─ denoiser
    coordinates        (2, h, w) ─┘

The two channels are x and y, from -1 at the first latent of the whole picture to 1 at the last. Wang et al., "Patch
Diffusion", NeurIPS 2023, https://arxiv.org/abs/2304.12526, section 3.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.graphs.widening import widen

COORDINATES = "coordinates"
"""The raw input (2, h, w): x and y of each latent, or of each pixel where there is no autoencoder."""
NUM_COORDINATES = 2


def with_coordinates(graph: LayerGraph, component: str, convolution: str) -> LayerGraph:
    """A denoiser's graph, with its graphs of other sizes, changed so that they also read the coordinates of latents.

    It widens the denoiser's first convolution in place.

    Args:
        graph: the graph of one backbone, which reads its noisy samples in the component `component` alone.
        component: the name of the denoiser.
        convolution: the name of its first convolution, below the component.

    Raises:
        ModelError: the denoiser cannot be widened.
    """
    widen(graph.components[component], convolution, NUM_COORDINATES)
    first, *others = (_reading(one, component, f"{component}.{convolution}.weight") for one in graph.of_sizes)
    return replace(first, others=tuple(others))


def _reading(graph: LayerGraph, component: str, weight: str) -> LayerGraph:
    """The graph of one size, in which each layer that reads noisy samples also reads `COORDINATES`.

    `weight`: the canonical name of the widened weight.
    """
    (backbone,) = graph.backbones
    noise = next(spec for spec in graph.inputs if spec.name == "noise")

    def joined(layer: Layer) -> Layer:
        if layer.component != component or backbone.noisy not in layer.reads:
            return layer
        run = _Placed(layer.run, layer.reads.index(backbone.noisy))
        return replace(layer, reads=(*layer.reads, COORDINATES), run=run)

    return replace(
        graph,
        layers=tuple(map(joined, graph.layers)),
        inputs=(
            *graph.inputs,
            TensorSpec(name=COORDINATES, shape=(NUM_COORDINATES, *noise.shape[1:]), dtype=noise.dtype),
        ),
        others=(),
        widened=graph.widened | {weight},
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """The `run` of a layer that also reads coordinates and joins them to the noisy samples, after their channels."""

    run: Any
    """The `run` of the layer without coordinates."""
    place: int
    """Position of the noisy samples among the tensors that the layer reads."""

    def __call__(self, component: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        *own, coordinates = tensors
        own[self.place] = torch.cat([own[self.place], coordinates.to(own[self.place].dtype)], dim=1)  # (B, C + 2, H, W)
        written: tuple[Tensor, ...] = self.run(component, *own)
        return written


def coordinates_of(width: int, height: int) -> Tensor:
    """X and y, from -1 to 1, of every latent of a whole picture of `width` x `height` latents, (2, height, width).

    >>> coordinates_of(3, 2)[0]
    tensor([[-1.,  0.,  1.],
            [-1.,  0.,  1.]])
    """
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    return torch.stack([x, y])


def has_coordinates(config: Mapping[str, Any]) -> bool:
    """Whether a denoiser's configuration has two input channels more than it predicts, for coordinates."""
    return config.get("in_channels") == (config.get("out_channels") or 0) + NUM_COORDINATES


def without_coordinates(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a denoiser's configuration, without the input channels for coordinates if it has them."""
    return {**config, "in_channels": config["out_channels"]} if has_coordinates(config) else dict(config)

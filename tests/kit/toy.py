"""A toy model with all that a schedule can get wrong: frozen work, skips over one and over many layers, a loss.

A step of it takes a thousandth of a second, so that schedules and layouts are tried on it; on models of diffusion two
schedules are.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.models.graphs.graph import Layer, LayerGraph

WIDTH = 4
SKIPS = {5: 4, 9: 2, 13: 0, 14: 13}
"""Layer -> the layer whose output it reads too."""


class Residual(nn.Module):
    """Two small matrices around a function that is not linear, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:
        """Of what it reads and the sum of its skips."""
        return x + self.down(torch.tanh(self.up(self.norm(x + sum(skips)))))


def toy_graph(num_layers: int = 16) -> LayerGraph:
    """In float64; a batch is `input`, which a frozen layer encodes, and `target`."""
    torch.manual_seed(0)
    encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    blocks = nn.ModuleDict({f"l{index}": Residual() for index in range(num_layers)})
    layers = [_layer("encode", "encoder", ("input",), ("t",), _encoded, ())]
    for index in range(num_layers):
        skips = [f"t{SKIPS[index]}"] if index in SKIPS else []
        reads = (f"t{index - 1}" if index else "t", *skips)
        name = f"l{index}"
        layers.append(_layer(name, "backbone", reads, (f"t{index}",), partial(_called, name), (name,)))
    reads = (f"t{num_layers - 1}", "target")
    layers.append(_layer("loss", "backbone", reads, ("loss",), _loss, ()))
    inputs = tuple(TensorSpec(name=name, shape=(WIDTH,), dtype="float64") for name in ("input", "target"))
    components = {"encoder": encoder.double(), "backbone": blocks.double()}
    return LayerGraph(
        layers=tuple(layers), components=components, inputs=inputs, backbones=(Backbone(prediction=None),)
    )


def _layer(
    name: str,
    component: str,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    run: Callable[..., tuple[Tensor, ...]],
    modules: tuple[str, ...],
) -> Layer:
    return Layer(name=name, component=component, reads=reads, writes=writes, modules=modules, run=run)


def _encoded(encoder: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return (encoder(x),)


def _called(name: str, blocks: nn.Module, *reads: Tensor) -> tuple[Tensor, ...]:
    return (blocks[name](*reads),)  # type: ignore[index] # a ModuleDict


def _loss(_: nn.Module, prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (((prediction - target) ** 2).mean(1),)

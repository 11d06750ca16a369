"""The work of frozen layers while samples are drawn through stages: conditions, once, and a denoiser's first layers.

    captions ──> text encoder ──> conditions ─────────────> stages        once
    time     ──> layers without weights, or before all adapters ──> stages    at every time step

The denoiser's first layers belong to no stage, because nothing in them is trained.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.runtime.weights.bringing import BroughtLayer, brought
from diffusionpipe.trainer.inference.fixed_batches import in_parts

Lead = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""A function of the times and, on ranks that hold them, the noisy latents, by name: it returns the outputs of leading
layers, the denoiser's first frozen ones, for a rank's stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """The outputs of frozen layers for a rank's stages, and the frozen layers that run at every time step."""

    graph: LayerGraph
    """The layer graph to which the layers belong."""
    tensors: Mapping[str, Tensor]
    """The conditions of the samples by name, which are the same at every time step."""
    lead: tuple[Layer, ...]
    """The frozen layers of the denoiser that read latents or times, to be run at every time step."""
    led: frozenset[str]
    """The names of the outputs of these layers that the stages read."""

    def leader(self, autocast: AbstractContextManager[object], rows: int) -> Lead | None:
        """A function that runs the denoiser's frozen layers, `rows` rows at a time; None where there are none.

        It takes the times and latents by name, and returns by name the outputs that the stages read.
        """
        reads = {name for layer in self.lead for name in layer.reads}
        given = {name: tensor for name, tensor in self.tensors.items() if name in reads}  # the others may be freed
        layers, components, led = self.lead, self.graph.components, self.led

        def run(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return run_layers(layers, components, part, targets=led)

        def lead(changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with torch.no_grad(), autocast:
                return in_parts(run, {**given, **changed}, rows)

        return lead if self.lead else None


def frozen_part(
    graph: LayerGraph,
    names: Collection[str],
    given: Mapping[str, Tensor],
    changing: Collection[str],
    weights: Mapping[str, BroughtLayer] = MappingProxyType({}),
) -> FrozenPart:
    """The tensors among `names` that frozen layers make of the given ones, and the layers that make the others.

    `changing`: the names of latents and times, which change from one denoising step to the next. `weights`: the layers
    whose weights are elsewhere while they do not run, by name.
    """
    moving = set(changing)
    lead, before = [], []
    for layer in needed_layers(graph.layers, names, given=(*given, *changing)):
        if moving.isdisjoint(layer.reads):
            before.append(layer)
        else:
            lead.append(layer)
            moving.update(layer.writes)
    # Of these layers alone; the tensors that move are made at each step.
    wanted = {*names, *(name for layer in lead for name in layer.reads)} - moving
    return FrozenPart(
        graph=graph,
        tensors=dict(given) | run_layers(brought(before, weights), graph.components, dict(given), targets=wanted),
        lead=brought(lead, weights),
        led=frozenset(moving.intersection(names)),
    )

"""The work of frozen layers while samples are drawn through stages: conditions, once, and a denoiser's first layers.

    captions ──> text encoder ──> conditions ─────────────> stages        once
    time     ──> layers without weights, or before all adapters ──> stages    at every time step

The second ones belong to no stage, because nothing of theirs is trained.
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
"""A function of times and, where they are here, noisy latents: the outputs of leading layers for a rank's stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """The outputs of frozen layers for a rank's stages: conditions, and layers to be run at every time step."""

    graph: LayerGraph
    tensors: Mapping[str, Tensor]
    """The conditions of the samples, which are the same at every time step."""
    lead: tuple[Layer, ...]
    """Layers of the denoiser that see latents or times, to be run at every time step; more than none with adapters."""
    led: frozenset[str]
    """The outputs of leading layers that the stages read."""

    def leader(self, autocast: AbstractContextManager[object], rows: int) -> Lead | None:
        """A function that runs the denoiser's first frozen layers, `rows` rows at a time; None where there are none.

        It takes the times and latents by name, and returns the outputs that the stages read.
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
    """Computes the tensors among `names` that follow from the given ones, and finds the layers that make the others.

    `changing`: the names of latents and times, which change from one denoising step to the next. `weights`: of the
    layers whose weights are elsewhere while they do not run.
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

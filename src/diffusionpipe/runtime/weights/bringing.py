"""Weights that are elsewhere while nothing reads them: three calls bring them, wherever they rest.

    they rest                prepare                    present                        release
    with their owners, in    makes room and starts to   waits until they are there     empties the room
    parts (`sharding`)       gather them
    with their owners, but   starts to bring the        waits until they are there     nothing: they stay
    whole here (`owned`)     updated ones
    on the host              starts to copy them to     waits for the copy, and lets   parameters show those on the
    (`host_weights`)         the staging memory         parameters show it             host again

An order says when the weights of a block are prepared and released (UNSHARD, RESHARD); the compiler lets its compute
wait for `present`. Frozen layers prepare the next one's weights while they run (`brought`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from diffusionpipe.models.graphs.graph import Layer


class Brought(Protocol):
    """Weights of a block or a layer that rest elsewhere (other ranks, the host) until compute reads them."""

    def prepare(self) -> None:
        """Begin to bring the weights, beside the compute that comes."""
        ...

    def present(self) -> None:
        """Let the compute that comes read the weights: it waits until they are there."""
        ...

    def release(self) -> None:
        """End the use of the weights: no compute reads them until they are prepared again."""
        ...


class BroughtLayer(Brought, Protocol):
    """The weights of a frozen layer, brought into memory that another layer's weights will overwrite."""

    def lasting(self, written: Tensor) -> Tensor:
        """The tensor that the layer wrote, copied if it is a view of these weights."""
        ...


def brought(layers: Sequence[Layer], weights: Mapping[str, BroughtLayer]) -> tuple[Layer, ...]:
    """The same layers, changed so that each brings its weights when it runs and begins to bring the next one's.

    `weights`: by layer; a layer whose weights are always there has none.
    """
    following: BroughtLayer | None = None
    found: list[Layer] = []
    # From the last layer on, so that each finds the next one that has weights elsewhere.
    for layer in reversed(layers):
        own = weights.get(layer.name)
        found.append(replace(layer, run=partial(_run, layer, own, following)) if own or following else layer)
        following = own or following
    return tuple(reversed(found))


def _run(
    layer: Layer, own: BroughtLayer | None, following: Brought | None, component: nn.Module, *tensors: Tensor
) -> tuple[Tensor, ...]:
    if own is None:
        if following is not None:
            following.prepare()
        return layer.run(component, *tensors)
    own.present()
    try:
        if following is not None:
            following.prepare()
        return tuple(own.lasting(tensor) for tensor in layer.run(component, *tensors))
    finally:
        own.release()

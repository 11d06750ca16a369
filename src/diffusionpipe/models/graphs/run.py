"""Layers one after the other, in one process: the reference that every layout must agree with."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from diffusionpipe.models.graphs.graph import Layer


def run_layers(
    layers: Sequence[Layer],
    components: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    *,
    targets: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Run the layers in order; returns name -> tensor of the targets, or, without targets, of all that layers wrote.

    `tensors`: name -> tensor that the layers read from outside. A tensor that is not a target is dropped after its last
    reader. Every given layer runs; `needed_layers` finds those that the targets need.
    """
    last_reader = {name: index for index, layer in enumerate(layers) for name in layer.reads}
    kept = set(targets) if targets is not None else {name for layer in layers for name in layer.writes}
    present = dict(tensors)
    for index, layer in enumerate(layers):
        written = layer.run(components[layer.component], *(present[name] for name in layer.reads))
        present.update(zip(layer.writes, written, strict=True))
        for name in (*layer.reads, *layer.writes):
            # A tensor that no layer reads goes at once.
            if name not in kept and last_reader.get(name, index) <= index:
                present.pop(name, None)
    return {name: present[name] for name in present if name in kept}


def needed_layers(layers: Sequence[Layer], targets: Collection[str], given: Collection[str]) -> tuple[Layer, ...]:
    """The layers, in order, that must run to get the targets from the given tensors, both by name.

    A raw input needs no layer, given or not.
    """
    missing = set(targets) - set(given)
    needed = []
    for layer in reversed(layers):
        if not missing.isdisjoint(layer.writes):
            missing.difference_update(layer.writes)
            missing.update(name for name in layer.reads if name not in given)
            needed.append(layer)
    return tuple(reversed(needed))

"""Which data-parallel group owns which parameter, where each of them holds a part."""

from collections.abc import Collection, Mapping
from math import prod

from diffusionpipe.costs.graph import ModelGraph

TRAINED_WEIGHT = 4
"""A trained parameter counts as so many frozen ones: its gradient and Adam's two moments stand beside it."""


def part_of_parameter(graph: ModelGraph, layers: Collection[str], parts: int) -> Mapping[str, int]:
    """Parameter of these layers -> the part that it belongs to, counted from 0; all parts are about equally heavy.

    A parameter belongs to one part as a whole. So whatever works on whole parameters, as optimizers, clipping, averages
    and checkpoints do, works on a part as on a stage. The largest parameter goes first, each to the part that is
    lightest so far (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 1969,
    https://doi.org/10.1137/0117039): the heaviest part is at most 4/3 of the least possible. Equal parameters go in the
    model's order, so every rank finds the same.
    """
    wanted = set(layers)
    names = {name for layer in graph.layers if layer.name in wanted for name in layer.parameters}
    weights = {
        p.name: prod(p.shape) * (TRAINED_WEIGHT if p.is_trainable else 1) for p in graph.parameters if p.name in names
    }
    loads = [0] * parts
    found = {}
    for name in sorted(weights, key=lambda name: -weights[name]):  # stable
        part = min(range(parts), key=loads.__getitem__)
        loads[part] += weights[name]
        found[name] = part
    return {name: found[name] for name in weights}


def blocks_in_common(graph: ModelGraph, blocks: Collection[Collection[str]]) -> Mapping[str, int]:
    """Parameters that layers of several of these blocks read -> of how many."""
    counts: dict[str, int] = {}
    of_layer = {layer.name: layer.parameters for layer in graph.layers}
    for block in blocks:
        for name in {name for layer in block for name in of_layer[layer]}:
            counts[name] = counts.get(name, 0) + 1
    return {name: count for name, count in counts.items() if count > 1}

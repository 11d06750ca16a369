"""Which data-parallel group owns which parameter, where each of them holds a part."""

from collections.abc import Collection, Mapping, Sequence
from math import prod

from diffusionpipe.costs.graph import ModelGraph
from diffusionpipe.ir import Mesh, Schedule, Sharded

TRAINED_WEIGHT = 4
"""A trained parameter counts as this number of frozen ones: its gradient and Adam's two moments come with it."""


def part_of_parameter(
    graph: ModelGraph, layers: Collection[str], parts: int, *, sharded: Sharded = Sharded.ALL
) -> Mapping[str, int]:
    """Parameter of these layers -> the number of its part, 0 to `parts` - 1; all parts are about equally heavy.

    With `Sharded.OPTIMIZER` only trained parameters are in parts.

    A parameter belongs to one part as a whole. So whatever works on whole parameters, as optimizers, clipping, averages
    and checkpoints do, works on a part as on a stage. The largest parameter goes first, each to the part that is
    lightest so far (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 1969,
    https://doi.org/10.1137/0117039): the heaviest part is at most 4/3 of the least possible. Equal parameters go in the
    model's order, so every rank finds the same.
    """
    names = graph.parameters_of(layers)
    weights = {
        p.name: prod(p.shape) * (TRAINED_WEIGHT if p.is_trainable else 1)
        for p in graph.parameters
        if p.name in names and (p.is_trainable or sharded is Sharded.ALL)
    }
    loads = [0] * parts
    found = {}
    for name in sorted(weights, key=lambda name: -weights[name]):  # stable
        part = min(range(parts), key=loads.__getitem__)
        loads[part] += weights[name]
        found[name] = part
    return {name: found[name] for name in weights}


def blocks_in_common(graph: ModelGraph, blocks: Collection[Collection[str]]) -> Mapping[str, int]:
    """Parameter that layers of several of these blocks use -> the number of these blocks; others are left out."""
    counts: dict[str, int] = {}
    for block in blocks:
        for name in graph.parameters_of(block):
            counts[name] = counts.get(name, 0) + 1
    return {name: count for name, count in counts.items() if count > 1}


def owners_on_workers(
    schedule: Schedule, blocks: Sequence[Sequence[str]], graph: ModelGraph, mesh: Mesh
) -> Mapping[int, Mapping[str, int]]:
    """Worker -> parameter of its trained blocks -> the data-parallel group that owns it.

    With `Sharded.OPTIMIZER` only trained parameters are listed.
    """
    placement = schedule.placement
    layers: dict[int, dict[str, None]] = {}
    for index, stage in enumerate(placement.stages):
        if not placement.is_frozen(index):
            layers.setdefault(stage.worker, {}).update(dict.fromkeys(blocks[stage.weights]))
    return {worker: part_of_parameter(graph, own, mesh.parts, sharded=mesh.sharded) for worker, own in layers.items()}

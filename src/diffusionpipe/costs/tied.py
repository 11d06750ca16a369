"""Trained parameters that layers of several blocks use.

Every rank has one copy of such a parameter, and its gradients add up there. So each rank that trains one of these
blocks must train all of them: as stages of one worker, which a loop, a V or two directions may put side by side, or as
buckets of one stage. Elsewhere each rank would train a copy of its own, and the copies would drift apart.
"""

from collections.abc import Iterator, Mapping, Sequence

from diffusionpipe.costs.graph import ModelGraph
from diffusionpipe.ir import Placement


def tied_blocks(graph: ModelGraph, blocks: Sequence[Sequence[str]]) -> Mapping[str, tuple[int, ...]]:
    """Name of a trained parameter -> indices of the blocks whose layers use it, where these are several."""
    trained = {parameter.name for parameter in graph.parameters if parameter.is_trainable}
    users: dict[str, tuple[int, ...]] = {}
    for block, layers in enumerate(blocks):
        for name in sorted(trained & graph.parameters_of(layers)):
            users[name] = (*users.get(name, ()), block)
    return {name: found for name, found in users.items() if len(found) > 1}


def tied_problems(graph: ModelGraph, placement: Placement, blocks: Sequence[Sequence[str]]) -> Iterator[str]:
    """A sentence for an error for each trained parameter of which several ranks would train copies that drift apart.

    `blocks`: the layers of each trained block.
    """
    workers: dict[int, set[int]] = {}
    for index, stage in enumerate(placement.stages):
        if not placement.is_frozen(index):
            workers.setdefault(stage.weights, set()).add(stage.worker)
    for name, users in tied_blocks(graph, blocks).items():
        first = users[0]
        other = next((block for block in users if workers.get(block) != workers.get(first)), None)
        if other is not None:
            layers = [_user(graph, name, blocks[block]) for block in (first, other)]
            homes = [f"worker {' and '.join(map(str, sorted(workers[block])))}" for block in (first, other)]
            yield (
                f"{layers[0]} and {layers[1]} train the same parameter {name}, but they are in block {first} on "
                f"{homes[0]} and in block {other} on {homes[1]}, so each would train a copy of its own; use a layout "
                "that puts both on one worker, such as stages = 1 with data_parallel or a V-shaped schedule, or give "
                "each layer a parameter of its own"
            )


def _user(graph: ModelGraph, parameter: str, layers: Sequence[str]) -> str:
    return next(name for name in layers if parameter in graph.layer(name).parameters)

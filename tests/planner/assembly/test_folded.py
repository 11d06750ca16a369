"""Cuts of a model with skips for V-shaped placements."""

from itertools import combinations, pairwise

import pytest

from diffusionpipe.costs import Backbone, LayerSpec, ModelGraph, ParameterSpec, TensorSpec
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.assembly.folded import folded_cuts, is_folded, stage_starts
from diffusionpipe.schedules.building.shapes import linear, loop, wave


def u_net(depth: int, sizes: list[int]) -> ModelGraph:
    """2 x depth layers; the output of layer i goes to the next layer and, on the way down, to layer 2 depth - 1 - i."""
    layers, tensors = [], []
    for i in range(2 * depth):
        reads = [f"t{i - 1}"] if i else []
        mirror = 2 * depth - 1 - i
        if mirror < i - 1:
            reads.append(f"t{mirror}")
        layers.append(
            LayerSpec(name=f"l{i}", component="unet", reads=tuple(reads), writes=(f"t{i}",), parameters=(f"w{i}",))
        )
        tensors.append(TensorSpec(name=f"t{i}", shape=(sizes[i],), needs_gradient=True))
    parameters = tuple(ParameterSpec(name=f"w{i}", shape=(1,)) for i in range(2 * depth))
    return ModelGraph(
        layers=tuple(layers),
        tensors=tuple(tensors),
        parameters=parameters,
        inputs=(),
        backbones=(Backbone(loss=f"t{2 * depth - 1}"),),
    )


def bytes_sent(graph: ModelGraph, starts, workers) -> int:
    layers = graph.backbone_layers
    blocks = [layers[a:b] for a, b in pairwise((*starts, len(layers)))]
    return sum(
        2 * graph.tensor(name).num_bytes
        for (producer, consumer), names in graph.flows(blocks).items()
        if workers[producer] != workers[consumer]
        for name in names
    )


def slowest(times, starts, workers) -> float:
    loads = dict.fromkeys(workers, 0.0)
    for (start, stop), worker in zip(pairwise((*starts, len(times))), workers, strict=True):
        loads[worker] += sum(times[start:stop])
    return max(loads.values())


@pytest.mark.parametrize(
    ("times", "sizes"),
    [
        ([1.0] * 8, [8, 8, 4, 4, 4, 4, 8, 8]),
        ([3, 1, 2, 1, 5, 1, 1, 4], [9, 7, 5, 3, 2, 4, 6, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 9, 1, 9, 1, 9, 1, 9]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_cut_sends_less_at_that_balance(times, sizes, ranks):
    graph, workers = u_net(4, sizes), wave(ranks, 2)
    every = [(0, *cut) for cut in combinations(range(1, 8), 2 * ranks - 1)]
    limit = 1.05 * min(slowest(times, cut, workers) for cut in every)
    allowed = [cut for cut in every if slowest(times, cut, workers) <= limit]
    found = folded_cuts(graph, times, ranks)
    assert found in allowed
    assert bytes_sent(graph, found, workers) == min(bytes_sent(graph, cut, workers) for cut in allowed)


def test_in_an_even_u_net_no_skip_leaves_its_rank():
    graph = u_net(4, [4] * 8)
    assert folded_cuts(graph, [1.0] * 8, 2) == (0, 2, 4, 6)
    assert bytes_sent(graph, (0, 2, 4, 6), wave(2, 2)) == 2 * 2 * 4 * 4  # the two edges at the border of the rings
    assert bytes_sent(graph, (0, 4), linear(2)) == 4 * 2 * 4 * 4


def test_only_vs_of_models_with_skips_are_folded():
    assert is_folded(wave(3, 2))
    assert not any(is_folded(workers) for workers in (linear(4), loop(2, 2), wave(2, 3)))
    times = [1.0, 1, 1, 1, 1, 1, 1, 9]
    chain = u_net(4, [4] * 8)
    assert stage_starts(chain, times, loop(2, 2)) != stage_starts(chain, times, wave(2, 2))


def test_too_few_layers_are_refused():
    with pytest.raises(ConfigError, match="10 stages need 10 trained layers, but there are 8"):
        folded_cuts(u_net(4, [1] * 8), [1.0] * 8, 5)

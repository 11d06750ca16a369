"""Micro-batches of several sizes in one step: every layout gives the gradients of one process."""

import random
from dataclasses import replace

import pytest
import torch
from kit.descriptions import described
from kit.layouts import assert_same_step
from kit.real_pictures import SIZES as REAL_SIZES
from kit.real_pictures import save_real, steps_over
from kit.size_cases import KINDS, LAYOUTS, MIXED, compare, graph_of
from kit.sized_steps import mixed_steps, one_process, samples_of
from kit.tiers import quick_and_slow

from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.planner import build_plan


def check(kind, layout, steps=MIXED) -> None:
    graph = graph_of(kind)
    compare(graph, layout, [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(steps)])


CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS]
QUICK = [("unet", "1f1b"), ("unet", "filled"), ("transformer", "1f1b"), ("coordinates", "filled")]


@pytest.mark.parametrize(("kind", "layout"), quick_and_slow(CASES, quick=QUICK))
def test_mixed_steps_have_the_gradients_of_one_process(kind, layout):
    check(kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "transformer"])
@pytest.mark.parametrize("layout", ["zb-v", "filled"])
def test_twenty_mixed_steps_have_the_gradients_of_one_process(kind, layout):
    draw = random.Random(0)
    check(kind, layout, [tuple(size for size in draw.choices((0, 1, 2), k=4) for _ in range(2)) for _ in range(20)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("unet", "replicas"), ("transformer", "filled")])
def test_twenty_steps_over_photographs_of_five_aspects_and_two_areas(kind, layout, tmp_path):
    graph = graph_of(kind, REAL_SIZES)
    found = steps_over(save_real(tmp_path / "pictures"), graph, REAL_SIZES, batch=8, steps=20)
    assert {share.size for share in found.assignment.shares} == set(REAL_SIZES)
    assert len({size for sizes, _ in found.steps for size in sizes}) == len(REAL_SIZES)
    assert all(len(set(sizes)) > 1 for sizes, _ in found.steps), "each step mixes sizes"
    compare(graph, layout, found.steps)


def test_layers_of_another_aspect_give_other_gradients_though_every_shape_between_layers_is_equal():
    graph = graph_of("transformer")
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    crossing = {spec.name for spec in models[0].tensors if spec == models[1].tensor(spec.name)}
    assert any(name.startswith("transformer.") for name in crossing)
    sizes = (0, 0, 1, 1, 0, 0, 1, 1)
    batch = sizes, samples_of(graph, sizes)
    (found,) = mixed_steps(with_layers_of_the_first(graph), models, build_plan(models[0], LAYOUTS["1f1b"]), [batch])
    with pytest.raises(AssertionError):
        assert_same_step(found, one_process(graph, *batch))


def test_times_are_shifted_by_each_sample_s_own_tokens():
    graph = graph_of("transformer")
    shifted = []
    for own in graph.of_sizes:
        noise = next(layer for layer in own.layers if layer.name == "objective.noise")
        latents = torch.zeros(1, *own.inputs[-2].shape, dtype=torch.float64)
        time = torch.full((1,), 0.5, dtype=torch.float64)
        shifted.append(float(noise.run(graph.components["objective"], latents, latents, time)[1]))
    assert shifted[0] == shifted[1]
    assert shifted[2] != shifted[0]


def with_layers_of_the_first(graph: LayerGraph) -> LayerGraph:
    """The graph whose second aspect runs the first one's blocks: all layers that read and write what those do."""
    first, second, third = graph.of_sizes
    own = {layer.name: layer for layer in second.layers}
    blocks = [layer for layer in first.layers if "blocks" in layer.name]
    assert blocks
    own |= {layer.name: layer for layer in blocks}
    return replace(first, others=(replace(second, layers=tuple(own.values())), third))

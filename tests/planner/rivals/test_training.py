"""Layouts that other systems' planners choose train: loss and gradients are those of one process."""

from dataclasses import replace
from functools import cache

import pytest
from descriptions import described
from layouts import assert_same_step, reference_step, step_in_threads
from planner import synthetic
from tiny_models import raw_inputs, tiny_dit

from diffusionpipe.costs import AllReduce, LayerProfile, Link, ModelGraph, Profile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.simulated import simulated

BATCH, RANKS = 12, 3


@cache
def prepared():
    graph = tiny_dit()
    inputs = raw_inputs(graph, BATCH)
    return graph, described(graph), inputs, reference_step(graph, inputs)


def profile_of(model: ModelGraph) -> Profile:
    """The first trained layer with parameters has twice the work of all others together."""
    trained = {parameter.name for parameter in model.parameters if parameter.is_trainable}
    names = [layer.name for layer in model.layers if trained.intersection(layer.parameters)]
    layers = []
    for layer in model.layers:
        seconds = 2e-3 * len(names) if layer.name == names[0] else 1e-3 if layer.name in names else 1e-7
        numbers = {"forward": (seconds,), "input_grad": (seconds,), "weight_grad": (seconds,)}
        layers.append(LayerProfile(name=layer.name, activation=(1000,), workspace=(0,), **numbers))
    return Profile(
        graph=model, batch_sizes=(1,), layers=tuple(layers), device="synthetic", device_type="cuda",
        precision="float32", source="analytic",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["pipedream", "spp", "dapple"])
def test_a_rivals_layout_with_unequal_replicas_learns_the_same(name):
    graph, model, inputs, expected = prepared()
    slow = AllReduce(latency=1e-6, bandwidth=1e5)
    cluster = replace(synthetic.cluster(RANKS), intra=Link(1e-6, 1e5), intra_reduce=slow)
    setting = Setting(profile=profile_of(model), cluster=cluster, workload=synthetic.workload(BATCH))
    (rival,) = simulated([name], setting)
    assert rival.candidate.replicas == (2, 1), rival.sizes
    found = step_in_threads(graph, model, rival.candidate.layout(setting), inputs)
    assert_same_step(found, expected)

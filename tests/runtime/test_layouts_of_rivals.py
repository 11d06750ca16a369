"""Layouts that other systems' planners choose train: loss and gradients are those of one process."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from golden.plans import recorded_profile
from kit.descriptions import described
from kit.layouts import assert_same_step, copy_of, planned_step, reference_step, step_in_threads
from kit.tiny_models import narrow_stable_diffusion_2, raw_inputs, tiny_dit
from planner import synthetic

from diffusionpipe.costs import AllReduce, LayerProfile, Link, ModelGraph, Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.ir.files import plan_from_text, plan_to_text
from diffusionpipe.models.graphs.graph import canonical_names
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


@pytest.mark.parametrize(("name", "sizes"), [("bapipe", "2 stages"), ("megatron", "4 stages on 2 ranks")])
def test_two_steps_of_a_rivals_written_plan_are_those_of_one_process(name, sizes):
    """A device has room for one of two stages, so Megatron's layout has two chunks of the four equal blocks."""
    graph = tiny_dit(transformer={"num_layers": 5})  # the first block has the embeddings, which no other one has
    model, inputs = described(graph), raw_inputs(graph, BATCH)
    weights = sum(prod(one.shape) for one in model.parameters)
    cluster = synthetic.cluster(2, memory=16 * weights * 0.8 / 1e9)
    setting = Setting(profile=profile_of(model), cluster=cluster, workload=synthetic.workload(BATCH))
    (rival,) = simulated([name], setting)
    assert rival.sizes.startswith(sizes), (rival.sizes, weights, rival.proposal.overflow)
    plan = plan_from_text(plan_to_text(rival.plan()), source=name)
    own, alone = copy_of(graph), copy_of(graph)
    for _ in range(2):
        found, expected = planned_step(own, model, plan, inputs), reference_step(alone, inputs)
        assert_same_step(found, expected)
        for one, step in ((own, found), (alone, expected)):
            with torch.no_grad():
                for parameter, place in canonical_names(one.components).items():
                    if place in step.gradients:
                        parameter -= 0.1 * step.gradients[place]
        own = copy_of(own)  # `planned_step` would use its copies of the same graph again


@pytest.mark.slow
def test_the_plan_of_sd_2_1_that_pipedreams_planner_chooses_trains():
    """The plan file of the real model runs a model of the same layers with few channels."""
    profile, cluster = recorded_profile("sd-2.1-a100-80"), load_cluster("a100-80x8")
    (rival,) = simulated(["pipedream"], Setting(profile=profile, cluster=cluster, workload=Workload(batch=16)))
    assert rival.sizes == "6 stages (2,1,1,1,1,2 replicas), 4 micro-batches"
    plan = plan_from_text(plan_to_text(rival.plan()), source="PipeDream's plan")
    graph = narrow_stable_diffusion_2()
    model, inputs = described(graph), raw_inputs(graph, plan.batch)
    assert {layer for block in plan.blocks for layer in block} == {layer.name for layer in model.layers}
    assert_same_step(planned_step(graph, model, plan, inputs), reference_step(graph, inputs))

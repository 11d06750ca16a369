"""A weight that layers of several stages train: where they are on one rank its gradients are those of one process."""

import pytest
import torch
from kit.descriptions import described
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs
from torch import nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.planner import Layout

LAYOUTS = {
    "one stage": {"stages": 1, "data_parallel": 2},
    "buckets": {"stages": 1, "data_parallel": 2, "buckets": 3},
    "a V": {"schedule": "zb-v"},
    "copies of a V": {"schedule": "zb-v", "data_parallel": 2},
    "replicas in a V": {"schedule": "zb-v", "replicas": (2, 1)},
    "a wave": {"schedule": "hanayo"},
    "two directions": {"schedule": "chimera"},
    "two directions with buckets": {"schedule": "chimera", "buckets": 2},
    "two directions, split": {"schedule": "dualpipe"},
}


@pytest.fixture(scope="module")
def prepared():
    """A module whose first and last child are the same one."""
    torch.manual_seed(0)
    twice = nn.Linear(6, 6)
    module = nn.Sequential(twice, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), twice).double()
    spec = TensorSpec(name="x", shape=(6,), dtype="float64")
    graph = sequential_graph(module, inputs=spec, target=spec, loss=lambda p, t: ((p - t) ** 2).mean(1))
    inputs = raw_inputs(graph, 16)
    return module, graph, described(graph), inputs, reference_step(graph, inputs)


def test_the_same_child_twice_is_two_layers_with_one_weight(prepared):
    module, _, model, inputs, expected = prepared
    assert model.layer("model.0").parameters == model.layer("model.5").parameters == ("model.0.weight", "model.0.bias")
    loss = ((module(inputs["input"]) - inputs["target"]) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, [module[0].weight])
    torch.testing.assert_close(expected.gradients["model.0.weight"], gradient, rtol=1e-12, atol=0)


QUICK = ["a V", "replicas in a V", "two directions", "two directions with buckets"]


@pytest.mark.parametrize("name", quick_and_slow(LAYOUTS, quick=QUICK))
def test_its_gradient_is_that_of_one_process(prepared, name):
    _, graph, model, inputs, expected = prepared
    layout = Layout(**{"batch": 16, "stages": 2, "microbatches": 4} | LAYOUTS[name])
    assert_same_step(step_in_threads(graph, model, layout, inputs, again=True), expected)

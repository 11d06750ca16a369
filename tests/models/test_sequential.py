from collections import OrderedDict

import torch
from torch import nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.run import run_layers


def _loss(prediction, target):
    return nn.functional.cross_entropy(prediction, target, reduction="none")


def test_layers_give_bit_for_bit_output_and_gradients_of_the_module():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    graph = sequential_graph(module, inputs=(4,), target=TensorSpec(name="any", shape=(), dtype="int64"), loss=_loss)
    inputs, target = torch.randn(5, 4), torch.arange(5) % 3
    expected = _loss(module(inputs), target)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    tensors = {"input": inputs, "target": target}
    loss = run_layers(graph.layers, graph.components, tensors, targets=["loss"])["loss"]
    loss.sum().backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))


def test_names_are_those_of_the_children():
    module = nn.Sequential(OrderedDict(encode=nn.Linear(4, 4), act=nn.Tanh(), decode=nn.Linear(4, 4)))
    graph = sequential_graph(module, inputs=(4,), target=(4,), loss=lambda p, t: (p - t).sum(1))
    assert [layer.name for layer in graph.layers] == ["model.encode", "model.act", "model.decode", "objective.loss"]
    assert [layer.writes for layer in graph.layers] == [("hidden.0",), ("hidden.1",), ("prediction",), ("loss",)]
    assert describe(graph).inputs == ("input", "target")


def test_a_single_child_writes_the_prediction():
    graph = sequential_graph(nn.Sequential(nn.Linear(4, 4)), inputs=(4,), target=(4,), loss=lambda p, t: (p - t).sum(1))
    assert [layer.writes for layer in graph.layers] == [("prediction",), ("loss",)]

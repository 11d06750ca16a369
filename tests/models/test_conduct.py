"""Layers that draw random numbers, mix samples or change what they keep are refused, whichever way they come."""

import pytest
import torch
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiny_models import raw_inputs
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.planner import Layout


def graph_of(*children: nn.Module):
    """Layers on five tokens of six numbers."""
    torch.manual_seed(0)
    spec = TensorSpec(name="x", shape=(5, 6), dtype="float64")
    module = nn.Sequential(*children).double()
    return sequential_graph(module, inputs=spec, target=spec, loss=lambda p, t: ((p - t) ** 2).flatten(1).mean(1))


class Call(nn.Module):
    """A function as a module, of its input and another module."""

    def __init__(self, function, *inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


RANDOM = "draws random numbers"
MIXED = "mixes the samples of a batch"
DEPENDENT = "for a sample depends on the other samples"
STATE = "each time it runs"
REFUSED = {
    "dropout": (lambda: nn.Dropout(0.1), rf"model.1 {RANDOM} \(Dropout\)"),
    "dropout in a block": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), rf"{RANDOM} \(Dropout\)"),
    "dropout as a function": (lambda: Call(lambda x: functional.dropout(x, 0.5)), RANDOM),
    "noise": (lambda: Call(lambda x: x + torch.randn_like(x)), RANDOM),
    "random slopes": (nn.RReLU, RANDOM),
    "batch norm": (lambda: nn.BatchNorm1d(5), rf"model.1 {MIXED} \(BatchNorm1d\)"),
    "batch norm without a state": (lambda: nn.BatchNorm1d(5, track_running_stats=False), MIXED),
    "batch norm as a function": (lambda: Call(lambda x: functional.batch_norm(x, None, None, training=True)), MIXED),
    "instance norm with a state": (lambda: nn.InstanceNorm1d(5, track_running_stats=True), STATE),
    "a power iteration": (lambda: spectral_norm(nn.Linear(6, 6)), STATE),
    "the mean of all samples": (lambda: Call(lambda x: x - x.mean(0)), DEPENDENT),
    "time first": (lambda: Call(lambda x, inner: inner(x)[0], nn.LSTM(6, 6)), DEPENDENT),
    "attention with time first": (
        lambda: Call(lambda x, inner: inner(x, x, x)[0], nn.MultiheadAttention(6, 2)),
        DEPENDENT,
    ),
    "written in place": (lambda: nn.ReLU(inplace=True), "changes in place what it reads"),
    "a view written in place": (lambda: Call(lambda x: x.flatten(1).relu_().view_as(x)), "changes in place"),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_layout_would_change_is_refused_with_its_reason(build, words):
    with pytest.raises(ModelError, match=words):
        describe(graph_of(nn.Linear(6, 6), build()))


def test_a_graph_is_looked_at_and_its_modules_are_not_changed():
    module = nn.BatchNorm1d(5)
    with pytest.raises(ModelError):
        describe(graph_of(nn.Linear(6, 6), module))
    assert not module.num_batches_tracked
    assert not module.running_mean.any()


ACCEPTED = {
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "dropout that is off": lambda: nn.Dropout(0.5).eval(),
    "batch norm that is off": lambda: nn.BatchNorm1d(5).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(5),
    "group norm": lambda: nn.GroupNorm(1, 5),
    "an encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    "attention that turns its input": lambda: Call(
        lambda x, inner: inner(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), nn.MultiheadAttention(6, 2)
    ),
    "several tensors": lambda: nn.Sequential(nn.LSTM(6, 6, batch_first=True), Call(lambda found: found[0])),
}
"""The last two are one layer here."""


def two_stages_are_one_process(graph):
    inputs = raw_inputs(graph, 8)
    layout = Layout(batch=8, stages=2, microbatches=4, schedule="zb-h1")
    assert_same_step(step_in_threads(graph, describe(graph), layout, inputs), reference_step(graph, inputs))


@pytest.mark.parametrize("build", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted_trains_as_one_process_does(build):
    two_stages_are_one_process(graph_of(nn.Linear(6, 6), build(), nn.Linear(6, 6)))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_tuples_of_tensors_pass_between_layers_and_stages(cut):
    """The states of an LSTM have their samples in dimension 1, and both parts of the tuple are read behind the cut."""
    graph = graph_of(
        nn.Linear(6, 6),
        nn.LSTM(6, 6, num_layers=2, batch_first=True),
        Call(lambda found: {"all": found[0], "last": found[1][0]}),
        Call(lambda found: found["all"] + found["last"].sum(0)[:, None]),
    )
    assert graph.layers[1].writes == ("hidden.1", "hidden.1.1", "hidden.1.2")
    inputs = raw_inputs(graph, 8)
    layout = Layout(batch=8, stages=2, microbatches=4, splits=(f"model.{cut}",))
    expected = torch.autograd.grad(
        ((graph.components["model"](inputs["input"]) - inputs["target"]) ** 2).mean(),
        [graph.components["model"][0].weight],
    )
    found = step_in_threads(graph, describe(graph), layout, inputs)
    assert_same_step(found, reference_step(graph, inputs))
    torch.testing.assert_close(found.gradients["model.0.weight"], expected[0], rtol=1e-11, atol=0)


def test_a_tensor_without_samples_is_refused():
    with pytest.raises(ModelError, match=r"model.1 returns a tensor of shape \(5, 6\) for 2 samples"):
        graph_of(nn.Linear(6, 6), Call(lambda x: x[0]))

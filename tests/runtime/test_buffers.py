"""Memory is written again when no tensor lies in it: gradients of parameters, rows of the store, a planted pool."""

import pytest
import torch
from kit.descriptions import described
from kit.handed_views import SECOND, layout_in_orders
from kit.layouts import assert_same_step, planned_step, reference_step
from kit.reusing_pool import ReusingPool, planted_pools
from kit.tiny_models import raw_inputs
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import Range
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.comm.threads import Hub, ThreadTransport
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.machine.buffers import memory_of, num_in_memory_of
from diffusionpipe.runtime.weights import gradients
from diffusionpipe.runtime.weights.gradients import BlockGradients

CPU = torch.device("cpu")
VIEWS = {
    "identity": lambda x: x,
    "a slice": lambda x: x[1:],
    "another shape": lambda x: x.reshape(-1),
    "another dtype": lambda x: x.view(torch.int32),
    "a leaf": lambda x: x.detach().requires_grad_(),
    "saved by autograd": lambda x: x.detach().requires_grad_().pow(2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_tensor_lies_in_memory_as_long_as_anything_that_torch_keeps_of_it(view):
    pool = ReusingPool(num_overlooked=0)
    first = pool.take((2, 3), torch.float32)
    where = memory_of(first)
    held = view(first)
    del first
    other = pool.take((2, 3), torch.float32)
    assert memory_of(other) != where
    del held
    again = pool.take((2, 3), torch.float32)
    assert (memory_of(again), pool.num_reused) == (where, 1)


class Rows(nn.Module):
    """Two tables that are reshaped: each gradient is a view of that of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first.view(3, 4) + self.second.view(3, 4)).sin()


def test_a_gradient_that_shares_its_memory_gets_memory_of_its_own_before_more_is_added():
    torch.manual_seed(0)
    module, xs = Rows().double(), torch.randn(3, 2, 3, 4).double()
    block = BlockGradients(tuple(module.parameters()), (0,), ThreadTransport(Hub(1), 0))
    expected = torch.autograd.grad(module(xs).sum(), list(module.parameters()))
    for _ in range(2):
        block.reset()
        for x in xs:
            module(x).sum().backward()
            block.added(is_whole=True)
        found = [parameter.grad for parameter in module.parameters()]
        assert all(num_in_memory_of(gradient) == 1 for gradient in found)
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)


def test_a_result_does_not_lie_in_rows_that_the_next_batch_overwrites():
    store = RowStore({"x": Range(0, 4)}, {"x": TensorSpec(name="x", shape=(2,))}, CPU)
    store.write("x", Range(0, 4), torch.ones(4, 2))
    result, other = store.lasting(store.view("x", Range(1, 3))), torch.zeros(2)
    store.write("x", Range(0, 4), torch.zeros(4, 2))
    assert result.eq(1).all()
    assert store.lasting(other) is other


def graph_of(*children: nn.Module):
    torch.manual_seed(0)
    spec = TensorSpec(name="x", shape=(6,), dtype="float64")
    module = nn.Sequential(*children).double()
    return sequential_graph(module, inputs=spec, target=spec, loss=lambda p, t: ((p - t) ** 2).mean(1))


def step_in_orders(graph, second=SECOND[0]):
    model, layout = described(graph), layout_in_orders(second, ["model.1", "model.2", "model.3"])
    return planned_step(graph, model, build_plan(model, layout), raw_inputs(graph, layout.batch))


def handing_on() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 6)]


def adding_tables() -> list[nn.Module]:
    return [nn.Linear(6, 6), Tables(), nn.Linear(6, 6), nn.Linear(6, 6)]


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first.view(2, 3) + self.second.view(2, 3)).flatten()


STAGES = {"a stage hands on what it received": handing_on, "a stage adds tables that it reshapes": adding_tables}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("children", STAGES.values(), ids=STAGES)
def test_gradients_are_those_of_one_process(children, second):
    graph = graph_of(*children())
    assert_same_step(step_in_orders(graph, second), reference_step(graph, raw_inputs(graph, 8)))


def overlooking_two(tensor):
    """A view, and what it is a view of."""
    return max(num_in_memory_of(tensor) - 2, 1)


def test_a_gradient_that_lies_in_memory_of_another_is_noticed(monkeypatch):
    graph = graph_of(*adding_tables())
    monkeypatch.setattr(gradients, "num_in_memory_of", overlooking_two)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_step(step_in_orders(graph), reference_step(graph, raw_inputs(graph, 8)))


@pytest.mark.parametrize("num_overlooked", [0, 2])
def test_an_early_return_of_a_buffer_is_noticed(monkeypatch, num_overlooked):
    """A planted pool gives received memory out again; a view that is handed on lies in it as two tensors."""
    graph = graph_of(*handing_on())
    pools, inputs = planted_pools(monkeypatch, num_overlooked), raw_inputs(graph, 8)
    if not num_overlooked:
        assert_same_step(step_in_orders(graph), reference_step(graph, inputs))
        assert any(pool.num_reused for pool in pools.values())
        return
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_step(step_in_orders(graph), reference_step(graph, inputs))

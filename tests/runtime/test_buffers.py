"""Memory is written again when no tensor lies in it: receive buffers, gradients of parameters, rows of the store."""

import pytest
import torch
from descriptions import described
from handed_views import SECOND, layout_in_orders
from layouts import assert_same_step, planned_step, reference_step
from tiny_models import raw_inputs
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import Range
from diffusionpipe.models.sequential import sequential_graph
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime import buffers, gradients
from diffusionpipe.runtime.buffers import BufferPool, num_in_memory_of
from diffusionpipe.runtime.gradients import BlockGradients
from diffusionpipe.runtime.store import RowStore
from diffusionpipe.runtime.threads import Hub, ThreadTransport

CPU = torch.device("cpu")
VIEWS = {
    "identity": lambda x: x,
    "a slice": lambda x: x[1:],
    "another shape": lambda x: x.reshape(-1),
    "another dtype": lambda x: x.view(torch.int32),
    "a leaf": lambda x: x.detach().requires_grad_(),
    "saved by autograd": lambda x: x.detach().requires_grad_().pow(2),
}


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_buffer_is_given_out_again_when_no_tensor_lies_in_its_memory(view):
    pool = BufferPool(CPU)
    first = pool.take((2, 3), torch.float32)
    where = address(first)
    held = view(first)
    del first
    assert address(pool.take((2, 3), torch.float32)) != where
    del held
    second = pool.take((2, 3), torch.float32)
    third = pool.take((2, 3), torch.float32)
    assert where in {address(second), address(third)}
    assert pool.num_allocated == 2


def test_buffers_of_other_shapes_and_dtypes_are_others():
    pool = BufferPool(CPU)
    for shape, dtype in [((2, 3), torch.float32), ((3, 2), torch.float32), ((2, 3), torch.float64)]:
        tensor = pool.take(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        del tensor
    assert pool.num_allocated == 3


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
            block.separate()
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


FAULTS = {
    "a buffer goes back too early": (buffers, handing_on),
    "a gradient lies in memory of another": (gradients, adding_tables),
}


@pytest.mark.parametrize(("module", "children"), FAULTS.values(), ids=FAULTS)
def test_two_tensors_that_are_overlooked_are_noticed(monkeypatch, module, children):
    graph = graph_of(*children())
    monkeypatch.setattr(module, "num_in_memory_of", overlooking_two)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_step(step_in_orders(graph), reference_step(graph, raw_inputs(graph, 8)))

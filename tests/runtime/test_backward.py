import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from diffusionpipe.runtime.compute.backward import run_backward


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_it_accumulates_exactly_what_torch_accumulates():
    ours, theirs = network(), network()
    for seed in range(2):
        torch.manual_seed(seed)
        x, gradient = torch.randn(2, 4).double(), torch.randn(2, 3).double()
        run_backward([get_gradient_edge(ours(x))], [gradient])
        torch.autograd.backward(theirs(x), gradient)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_several_outputs_go_back_together():
    x = torch.ones(3, requires_grad=True)
    run_backward([get_gradient_edge(2 * x), get_gradient_edge(3 * x)], [torch.ones(3), torch.ones(3)])
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_the_graph_is_freed():
    x = torch.ones(3, requires_grad=True)
    edge = get_gradient_edge(x.exp())
    run_backward([edge], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([edge], [torch.ones(3)])


def test_a_gradient_of_another_shape_is_refused():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([get_gradient_edge(2 * x)], [torch.ones(2)])

"""The library in one piece: own orders, several tensors, replicas, and the gradients of one process."""

import pytest
import torch
from torch import nn

import diffusionpipe as dp


@pytest.fixture(autouse=True)
def _default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


# The text of the promise, as a user would write it.
# fmt: off
def eager(ranks, microbatches):                          # sizes -> the actions of each rank, as a torch CSV writes them
    def row(rank):
        ahead = min(2 * (ranks - rank) - 1, microbatches)
        pairs = [(f"{rank}B{i}", f"{rank}F{i + ahead}") for i in range(microbatches)]
        return [f"{rank}F{i}" for i in range(ahead)] + [a for pair in pairs for a in pair if int(a[2:]) < microbatches]
    return [row(rank) for rank in range(ranks)]


def test_a_pipeline_of_own_orders_gives_the_gradients_of_one_process():
    torch.manual_seed(0), torch.set_default_dtype(torch.float64)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    layers = [dp.layer(nn.Linear(16, 16), writes="skip"), nn.Tanh(), dp.layer(nn.Linear(16, 16), writes="deep"),
              dp.layer(nn.Bilinear(16, 16, 16), reads=("deep", "skip")), nn.Linear(16, 4)]
    model = dp.pipeline(layers, loss=lambda output, target: (output - target).square().mean(1), example=(x, y))
    order = dp.schedule(eager, ranks=3, microbatches=4)      # no registry; an illegal order is refused with its place
    profile = dp.profile(model, analytic="cpu-1-thread")
    choice = dp.plan(profile, cluster="cpux2:2", batch=8, schedule=order, replicas=(1, 1, 2))
    with dp.run(model, choice.plan, ranks="threads") as run:
        loss, gradients = run.step(x, y), run.gradients()    # by the names of model.named_parameters(), whole
    (expected := model.loss(x, y)).backward()                # the same in one process
    assert abs(loss - expected.item()) < 1e-12 and dp.simulate(order).makespan == 18  # noqa: PT018
    assert all((gradients[name] - p.grad).norm() <= 1e-12 * p.grad.norm() for name, p in model.named_parameters())
# fmt: on

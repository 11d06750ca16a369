"""A step of two ranks in which each process has only its own samples; run with the kind of plan."""

import sys

import torch
from torch import nn

import diffusionpipe as dp


def main(sizes):
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    model = dp.pipeline(layers, loss=lambda o, t: (o - t).square().mean(1), example=(x, y))
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2))
    plan = dp.plan(profile, cluster="cpux2", batch=8, **sizes).plan
    for number in range(2):  # a second run joins the same job again
        with dp.run(model, plan) as run:
            own, target = torch.full_like(x, float("nan")), torch.full_like(y, float("nan"))
            for row in run.rows:
                own[row], target[row] = x[row], y[row]
            run.print(number, run.step(own, target), sorted(run.gradients()), len(run.rows))
            run.print(run.timeline().source, float(run.state_dict()["0.weight"].sum()), run.rows.start)


if __name__ == "__main__":
    main({"stages": 2, "microbatches": 2} if sys.argv[1] == "pipeline" else {"data_parallel": 2})

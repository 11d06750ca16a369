"""The noise scale of quadratics of known gradient and covariance, measured by the executor of real plans."""

from functools import partial

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, copy_of, feed_rows
from torch import Tensor, nn

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.costs.noise import noise_scale
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.trainer.step import noise_scale as module
from diffusionpipe.trainer.step.noise_scale import NOTHING_SMALLER, NoiseMeter, unmeasurable

WIDTH, LAYERS, BATCH = 5, 3, 12


class Half(nn.Module):
    """One layer's weights. The loss of a sample x is the sum of |w - x|² / 2 over layers, its gradient w - x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))


def run_layer(number: int, parts: nn.ModuleDict, samples: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
    own = samples[:, number * WIDTH : (number + 1) * WIDTH]
    loss = (parts[f"l{number}"].weight - own).square().sum(1) / 2
    return (loss + before[0] if before else loss,)


def quadratic() -> LayerGraph:
    encode = Layer(
        name="encode", component="encoder", reads=("raw",), writes=("x",), run=lambda encoder, raw: (raw.clone(),)
    )
    layers = [
        Layer(
            name=f"l{k}",
            component="parts",
            reads=("x", *(() if k == 0 else (f"h{k - 1}",))),
            writes=("loss" if k == LAYERS - 1 else f"h{k}",),
            modules=(f"l{k}",),
            run=partial(run_layer, k),
        )
        for k in range(LAYERS)
    ]
    return LayerGraph(
        layers=(encode, *layers),
        components={"encoder": nn.Identity(), "parts": nn.ModuleDict({f"l{k}": Half() for k in range(LAYERS)})},
        inputs=(TensorSpec(name="raw", shape=(WIDTH * LAYERS,), dtype="float64"),),
        backbones=(Backbone(prediction=None),),
    )


GRAPH = quadratic()
MODEL = described(GRAPH)


def measured(layout: Layout, samples: Tensor) -> list[tuple[float, float]]:
    """The sums over all ranks of each step's two numbers; the weights stay 0."""
    plan = build_plan(MODEL, layout)
    assert unmeasurable(plan) is None

    def main(rank, transport):
        worker = build_worker(copy_of(GRAPH), MODEL, plan, rank, transport, device=CPU)
        meter = NoiseMeter(worker, CPU)
        meter.watch(True)
        found = []
        for batch in samples:
            feed_rows(worker, {"raw": batch})
            worker.reset_gradients()
            worker.train.run()
            found.append(meter.own())
        return torch.stack(found)

    return [tuple(pair) for pair in sum(run_threads(plan.mesh.num_ranks, main)).tolist()]


def samples_of(seed: int, mean: float, deviation: float, count: int = 400) -> tuple[Tensor, float]:
    """Samples (count, batch, width), and tr S / |G|² of the gradients at w = 0, which are -x."""
    random = torch.Generator().manual_seed(seed)
    scales = deviation * torch.linspace(0.5, 1.5, WIDTH * LAYERS, dtype=torch.float64)
    noise = torch.randn(count, BATCH, WIDTH * LAYERS, generator=random, dtype=torch.float64)
    return mean + scales * noise, float(scales.square().sum()) / (mean**2 * WIDTH * LAYERS)


MICRO = {"batch": BATCH, "microbatches": 3}
GROUPS = {"batch": BATCH, "microbatches": 1, "data_parallel": 3}
LAYOUTS = {
    "micro-batches": Layout(stages=1, **MICRO),
    "micro-batches, 3 stages": Layout(stages=3, **MICRO),
    "groups of split backwards": Layout(stages=3, schedule="zb-h1", **GROUPS),
    "groups": Layout(stages=1, **GROUPS),
    "groups of 3 stages": Layout(stages=3, **GROUPS),
}
QUADRATICS = [(1.0, 1.0), (0.5, 1.0), (0.7, 1.0)]
"""Mean and deviation of the samples: noise scales of about 1.1, 4.4 and 2.2."""


@pytest.mark.parametrize("name", ["micro-batches", "groups"])
@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_400_measurements_are_within_a_tenth_of_the_known_scale(name, number):
    samples, expected = samples_of(number, *QUADRATICS[number])
    assert noise_scale(measured(LAYOUTS[name], samples)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("micro-batches", "micro-batches, 3 stages"),
        ("groups", "groups of 3 stages"),
        ("groups", "groups of split backwards"),
    ],
)
def test_stages_do_not_change_the_numbers(one, other):
    samples, _ = samples_of(0, 0.5, 1.0, count=25)
    for pair, same in zip(measured(LAYOUTS[one], samples), measured(LAYOUTS[other], samples), strict=True):
        assert pair == pytest.approx(same, rel=1e-9)


def test_one_measurement_is_the_formula_of_its_samples():
    samples, _ = samples_of(3, 1.0, 1.0, count=1)
    ((square, trace),) = measured(LAYOUTS["micro-batches"], samples)
    part, whole = (float(own.mean(0).square().sum()) for own in (samples[0, :4], samples[0]))
    assert square == pytest.approx((12 * whole - 4 * part) / 8)
    assert trace == pytest.approx((part - whole) / (1 / 4 - 1 / 12))


def test_exchanged_numbers_of_samples_are_noticed(monkeypatch):
    right = module.both_of
    monkeypatch.setattr(module, "both_of", lambda small, whole, b, batch: right(small, whole, batch, b))
    samples, expected = samples_of(0, *QUADRATICS[0])
    assert noise_scale(measured(LAYOUTS["micro-batches"], samples)) != pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(stages=3, batch=BATCH, microbatches=1), NOTHING_SMALLER),
        (Layout(stages=3, batch=BATCH, microbatches=3, versions=Versions.NEWEST), "without a flush"),
        (Layout(stages=3, schedule="zb-h1", **MICRO), "no micro-batch has a gradient of its own"),
        (Layout(stages=1, data_parallel=2, batch=BATCH, microbatches=1, sharded=Sharded.ALL), "sharded"),
    ],
    ids=["nothing smaller", "window", "split", "sharded"],
)
def test_a_plan_without_a_smaller_part_says_what_would_give_one(layout, words):
    assert words in str(unmeasurable(build_plan(MODEL, layout)))

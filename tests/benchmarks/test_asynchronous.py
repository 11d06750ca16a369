"""The recurrence that the benchmark trains by is the real pipeline, step by step."""

import copy
import json
from functools import partial

import pytest
import torch
from kit import windowed

from benchmarks.asynchronous.periods import flushed_period, period, time_of
from benchmarks.asynchronous.recurrence import Part, Recurrence, mean_ages, parts_of
from benchmarks.asynchronous.runs import RUNS, outcomes
from benchmarks.asynchronous.settings import SETTINGS
from benchmarks.asynchronous.summary import tables_of
from diffusionpipe.ir.versions import Versions
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.planner import build_plan
from diffusionpipe.trainer.optim.staleness_rates import factor_at

STEPS = 5
CASES = [
    ("dit", Versions.STASHED, 3, 2),
    ("dit", Versions.VERTICAL, 3, 2),
    ("dit", Versions.DELAYED, 3, 2),
    ("stable diffusion", Versions.NEWEST, 2, 1),
]


class Rising(torch.optim.SGD):
    """With the rates of the pipeline's steps."""

    number = 0

    def step(self):
        self.param_groups[0]["lr"] = windowed.rates_at(self.number)["momentum"]
        self.number += 1
        super().step()


@pytest.mark.parametrize(("name", "versions", "stages", "microbatches"), CASES)
def test_losses_and_weights_are_those_of_the_pipeline(name, versions, stages, microbatches):
    graph, model, batches = windowed.model_of(name)
    batches, make = batches[:STEPS], partial(Rising, momentum=0.9)
    plan = build_plan(model, windowed.layout_of(versions, stages, microbatches))
    found = windowed.pipeline_of(graph, model, plan, batches, ("momentum",), (STEPS,))
    own = copy.deepcopy(graph)
    named = [windowed.trained_of(own, layers) for layers in plan.blocks[:stages]]
    start = {key: p.detach().clone() for block in named for key, p in block.items()}
    parameters = [list(block.values()) for block in named]
    sequential = Recurrence(parameters, parts_of(plan), [make(block) for block in parameters])
    losses = []
    for inputs in batches:

        def loss_of(rows, inputs=inputs):
            raw = {key: value[list(rows)] for key, value in inputs.items()}
            return run_layers(own.layers, own.components, raw, targets=["loss"])["loss"].sum() / windowed.BATCH

        losses.append(sequential.step(loss_of))
    assert [loss for loss in found[-1][1] if loss] == pytest.approx(losses, rel=1e-12)
    reached = {key: value for values, *_ in found for key, value in values.items()}
    expected = {key: p.detach() for block in named for key, p in block.items()}
    apart = sum(float((reached[key] - value).square().sum()) for key, value in expected.items())
    moved = sum(float((start[key] - value).square().sum()) for key, value in expected.items())
    assert moved > 0
    assert (apart / moved) ** 0.5 <= 1e-12


def weight_after(steps, flushes=(), **others):
    """One weight of 1, the loss 0.5 w^2, a rate of 0.1: the gradient is the weight that is read."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    part = Part(rows=(0,), forward=(1,), backward=(1,))
    sequential = Recurrence([[weight]], [part], [torch.optim.SGD([weight], lr=0.1)], **others)
    for step in range(steps):
        if step in flushes:
            sequential.flush()
        sequential.step(lambda rows: 0.5 * weight.square())
    return float(weight.detach())


def test_weights_are_read_as_old_as_they_are_said_to_be():
    assert weight_after(3) == pytest.approx(1 - 0.1 - 0.1 - 0.1 * 0.9)  # reads 1, 1, 0.9
    assert weight_after(3, flushes=(2,)) == pytest.approx(0.8 - 0.1 * 0.8)


def test_a_prediction_goes_on_as_the_last_step_did():
    assert weight_after(3, is_predicted=True) == pytest.approx(1 - 0.1 - 0.1 - 0.1 * (0.9 + (0.9 - 1)))


def test_microbatches_that_read_the_same_versions_are_one_part():
    _, model, _ = windowed.model_of("dit")
    plans = {v: build_plan(model, windowed.layout_of(v, 3, 4)) for v in (Versions.STASHED, Versions.DELAYED)}
    assert mean_ages(parts_of(plans[Versions.STASHED])) == (0.5, 0.25, 0)
    assert [part.forward for part in parts_of(plans[Versions.DELAYED])] == [(1, 1, 1)]
    assert sum(len(part.rows) for part in parts_of(plans[Versions.STASHED])) == windowed.BATCH


def test_the_rate_by_staleness_fades_into_one_rate():
    assert [factor_at(step, 3, 100) for step in (0, 100, 300)] == [pytest.approx(1 / 3), 1, 1]
    assert factor_at(0, 0, 100) == 1


def test_without_a_flush_a_step_takes_four_sevenths():
    of_name = {setting.name: setting for setting in SETTINGS}
    assert all(period(one) * 7 == 4 * flushed_period() for one in SETTINGS if one.versions is not Versions.FLUSHED)
    assert float(time_of(of_name["stashed, m = 1, flushed_from = 0.5"], 400, 400)) == pytest.approx(200 * 4 / 7 + 200)
    assert time_of(of_name["flushed"], 400, 400) == 400


def test_runs_that_are_written_down_become_rows_beside_the_flushed_run(tmp_path):
    row = {"seed": 0, "ages": [0, 0, 0, 0], "recognised": 1.0, "processor": 1.0}
    rows = [
        {**row, "setting": "flushed", "loss": 0.8, "curve": [[380, 0.81], [400, 0.8]]},
        {**row, "setting": "delayed", "loss": 0.84, "curve": [[350, 0.805], [400, 0.801]]},
    ]
    (tmp_path / RUNS).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (made,) = tables_of(outcomes(tmp_path), 400)
    cells = [list(column.cells) for column in made.columns]
    assert [column[1] for column in cells][4:] == ["+5.0%", "+5.0%", "100.0%", "0.571", "0 of 1", "200"]
    assert [column[0] for column in cells][8] == "400"

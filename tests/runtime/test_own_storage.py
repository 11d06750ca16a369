"""A storage that tests alone know is saved in plans and run."""

import copy
from dataclasses import replace

import pytest
from kit.descriptions import described
from kit.every_second import OWN
from kit.layouts import CPU, step_in_threads
from kit.tiny_models import raw_inputs, tiny_stable_diffusion

from diffusionpipe.holding import STORAGES
from diffusionpipe.ir.files import plan_from_text, plan_to_text
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker

BATCH = 8


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(STORAGES, OWN.name, OWN)


def test_a_plan_file_holds_its_name_and_the_run_moves_these_layers_alone():
    graph = tiny_stable_diffusion()
    model, inputs = described(graph), raw_inputs(graph, BATCH)
    layout = Layout(batch=BATCH, stages=2, microbatches=2, encode_chunk=3)
    expected = step_in_threads(graph, model, layout, inputs)
    found = step_in_threads(graph, model, replace(layout, encoders=OWN.name), inputs)
    assert found.loss == expected.loss
    assert all(found.gradients[name].equal(gradient) for name, gradient in expected.gradients.items())
    plan = plan_from_text(plan_to_text(build_plan(model, replace(layout, encoders=OWN.name))))

    def moved(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        return {name for name in plan.blocks[-1] if name in worker.frozen_weights}

    weighted = {name for name in plan.blocks[-1][1::2] if model.parameters_of([name])}
    assert weighted
    assert run_threads(2, moved) == [weighted, weighted]

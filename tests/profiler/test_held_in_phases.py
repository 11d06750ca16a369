"""What ranks hold while they validate, draw and swap averages is what is predicted of it."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, feed_rows
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.prediction.held import NotingTransport
from diffusionpipe.holding import plain_states
from diffusionpipe.ir import PlanPhase
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.phases import phases_of
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.trainer.optim.ema import Ema

BATCH = 8
MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}
CASES = [("dit", "bfloat16", 2), ("stable diffusion", "float32", 2)]


@cache
def profiled(kind, precision):
    graph = MODELS[kind](torch.float32, resolution=16 if kind == "dit" else 8)
    model = described(graph, autocast=torch.bfloat16 if precision == "bfloat16" else None)
    profile = analytic_profile(graph, model, device="cpu-1-thread", precision=precision, batch_sizes=(2, 8))
    return graph, model, profile


def stored(executor):
    """Bytes of the rows that wait for the stages."""
    store = executor.store
    return sum(store.view(name, rows).nbytes for name, rows in store.extents.items())


class Uncounted(NotingTransport):
    """Another transport, whose own copy of what is sent is not counted: processes make none."""

    def send(self, tensor, destination):
        with _disable_current_modes():
            return super().send(tensor, destination)


def held(graph, model, plan, precision):
    """By rank, in a validation and in a step of denoising."""
    inputs = raw_inputs(graph, BATCH)
    narrow = torch.bfloat16 if precision == "bfloat16" else None

    def main(rank, transport):
        own, quiet = copy.deepcopy(graph), Uncounted(transport)
        worker = build_worker(own, model, plan, rank, quiet, device=CPU, precision=Precision(autocast=narrow))
        feed_rows(worker, inputs, PlanPhase.VALIDATE)
        found = []
        for executor in (worker.validate, worker.sample()):
            live = LiveBytes()
            with live:
                executor.run()
            found.append(live.peak + stored(executor))
        return found

    return run_threads(plan.mesh.num_ranks, main)


@pytest.mark.parametrize(("kind", "precision", "stages"), quick_and_slow(CASES, quick=CASES[:1]))
def test_validation_and_drawing_hold_within_5_percent_what_is_predicted(kind, precision, stages):
    graph, model, profile = profiled(kind, precision)
    plan = build_plan(model, Layout(batch=BATCH, stages=stages, microbatches=4, sample_batch=BATCH))
    setting = setting_of(profile, plan.mesh, plan.batch)
    setting = replace(setting, workload=replace(setting.workload, encode_chunk=BATCH))
    phases = phases_of(setting, plan, pictures=BATCH)
    for found, expected in zip(held(graph, model, plan, precision), phases, strict=True):
        assert found == pytest.approx([expected.validation, expected.drawing], rel=0.05)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_swapping_averages_takes_what_is_predicted(dtype, width):
    _, model, profile = profiled("dit", "bfloat16")
    plan = build_plan(model, Layout(batch=BATCH, stages=1, microbatches=4))
    setting = setting_of(profile, plan.mesh, plan.batch)
    workload = replace(setting.workload, states=plain_states(parameter=width, ema=4))
    (phases,) = phases_of(replace(setting, workload=workload), plan)
    named = {
        spec.name: nn.Parameter(torch.ones(spec.shape, dtype=dtype)) for spec in model.parameters if spec.is_trainable
    }
    ema, live = Ema(named, dict.fromkeys(named, 0.9)), LiveBytes()
    with live, ema.swapped():
        lasting, most = live.live, live.peak
    assert [lasting, most] == [phases.averages, phases.exchange]

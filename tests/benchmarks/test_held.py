import copy
from functools import cache

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, feed_rows
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from benchmarks.prediction.held import HeldBytes, NotingTransport, count_held
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.search.proposal import predict
from diffusionpipe.profiler.measured import profile_model
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker

BATCH = 16
MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}


KINDS = [(model, precision) for model in MODELS for precision in ("float32", "bfloat16")]


@cache
def profiled(kind, precision):
    graph = MODELS[kind](torch.float32)
    narrow = torch.bfloat16 if precision == "bfloat16" else None
    model = described(graph, autocast=narrow)
    profile = profile_model(graph, model, batch_sizes=(4,), precision=precision, repeats=1)
    return graph, model, profile, Precision(autocast=narrow)


def counted(graph, model, plan, precision):
    """The bytes that each rank holds at its peak in a third iteration."""
    inputs = raw_inputs(graph, BATCH)

    def main(rank, transport):
        noting, own = NotingTransport(transport), copy.deepcopy(graph)
        worker = build_worker(own, model, plan, rank, noting, device=CPU, precision=precision)
        for _ in range(2):
            feed_rows(worker, inputs)
            worker.train.run()
        feed_rows(worker, inputs)
        return count_held(worker, own, noting)

    return run_threads(plan.mesh.num_ranks, main)


@pytest.mark.parametrize(
    ("kind", "schedule", "checkpointed"),
    quick_and_slow(
        [
            (kind, schedule, again)
            for kind in KINDS
            for schedule in ("1f1b", "gpipe", "zb-h1")
            for again in ((), ("*",))
        ],
        quick=[(KINDS[2], "1f1b", ()), (KINDS[2], "zb-h1", ("*",))],
    ),
)
@pytest.mark.xdist_group("test_held")
def test_the_predicted_peak_is_what_a_run_holds(kind, schedule, checkpointed):
    graph, model, profile, precision = profiled(*kind)
    layout = Layout(batch=BATCH, stages=2, microbatches=4, schedule=schedule, checkpointed=checkpointed)
    plan = build_plan(model, layout)
    setting = setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed)
    predicted = [use.activations + use.messages for use in predict(setting, plan.train, plan.blocks, plan.mesh).memory]
    assert counted(graph, model, plan, precision) == pytest.approx(predicted, rel=0.1)


def test_a_storage_counts_once_until_it_goes_and_weights_never():
    weight, x = torch.ones(50, requires_grad=True), torch.ones(50)
    held = HeldBytes([weight])
    with held:
        y = (weight * x).exp()
        assert held.live == 2 * 200  # x for the product, y for the exponential
        held.note(y[10:])
        assert held.live == 2 * 200
        del y
        assert (held.live, held.peak) == (200, 400)

"""Models that fill holes learn in every layout what one process learns; masks are frozen work as any other."""

import copy
from functools import cache

import pytest
import torch
from kit.cuts import traced_once
from kit.descriptions import described
from kit.layouts import CPU, assert_same_step, merge, reference_step, run_step
from kit.tiers import quick_and_slow
from kit.tiny_described import CLIPS, wan_from_frames
from kit.tiny_models import (
    FILLING_FLUX,
    FILLING_UNET,
    randomise_pipeline,
    raw_inputs,
    tiny_flux,
    tiny_sdxl,
    tiny_stable_diffusion,
)

from diffusionpipe.ir import Range
from diffusionpipe.models.families import wan
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.parameters.lora import LoraSettings, adapt
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker

BATCH = 8
LAYOUTS = {
    "two stages, filled": {"stages": 2, "schedule": "1f1b"},
    "copies, filled": {"stages": 2, "data_parallel": 2, "schedule": "zb-h1"},
    "two stages a rank, filled": {"stages": 2, "schedule": "interleaved", "encoders": "host"},
}
MODELS = ("sd", "sdxl", "flux", "wan")
CASES = [(model, layout, is_adapted) for model in MODELS for layout in LAYOUTS for is_adapted in (False, True)]
QUICK = [("sd", "two stages, filled", False)]


@cache
def prepared(model, is_adapted):
    match model:
        case "sd":
            graph, trained = tiny_stable_diffusion(unet=FILLING_UNET), "unet"
        case "sdxl":
            graph, trained = tiny_sdxl(unet=FILLING_UNET), "unet"
        case "flux":
            graph, trained = tiny_flux(transformer=FILLING_FLUX), "transformer"
        case _:
            graph, trained = tiny_wan(), "transformer"
    if is_adapted:
        adapt(graph, [trained], LoraSettings(rank=2))
        materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
    inputs = raw_inputs(graph, BATCH)
    return graph, described(graph), inputs, reference_step(graph, inputs)


def tiny_wan():
    """A Wan from known frames, for clips of 5 frames."""
    pipeline = wan_from_frames()
    randomise_pipeline(pipeline)
    components = {name: getattr(pipeline, name).double() for name in wan.FAMILY.components}
    objective = Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {})
    with traced_once():
        return wan.FAMILY.graph(
            components, objective=objective, resolution=32, dtype="float64", clip=CLIPS["WanPipeline"]
        )


def assert_near(found, expected):
    """Each gradient within 1e-6 of the norm of all: Wan computes its norms in float32."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    total = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-6 * total, name


def at_the_start(unfilled):
    """Each worker runs all frozen layers of its share of the samples before anything else."""
    schedule, num_layers = unfilled.schedule, len(unfilled.blocks[-1])
    batch = sum(pipeline.num_samples for pipeline in schedule.placement.pipelines)
    borders = [worker * batch // schedule.num_workers for worker in range(schedule.num_workers + 1)]
    return {
        worker: [
            PlacedFill(position=at, component="", layers=layers, samples=Range(*borders[worker : worker + 2]))
            for at, layers in ((0, Range(0, num_layers - 3)), (len(order) // 2, Range(num_layers - 3, num_layers)))
        ]
        for worker, order in enumerate(schedule.orders)
    }


@pytest.mark.parametrize(("kind", "layout", "is_adapted"), quick_and_slow(CASES, quick=QUICK), ids=str)
def test_gradients_of_models_that_fill_holes_are_those_of_one_process(kind, layout, is_adapted):
    graph, model, inputs, expected = prepared(kind, is_adapted)
    plan = build_plan(
        model, Layout(batch=BATCH, microbatches=2, encode_chunk=3, **LAYOUTS[layout]), filler=at_the_start
    )

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        offset = worker.place.group * (BATCH // plan.mesh.data_parallel)
        rows = slice(offset + worker.encoded.start, offset + worker.encoded.stop)
        worker.feed(worker.prologue, {name: value[rows] for name, value in inputs.items()})
        worker.prologue.run()
        return run_step(worker, inputs)

    same = assert_near if kind == "wan" else assert_same_step
    same(merge(run_threads(plan.mesh.num_ranks, main)), expected)
    inverted = {**inputs, "mask": 1 - inputs["mask"]}
    assert reference_step(graph, inverted).loss != pytest.approx(expected.loss, rel=1e-6)

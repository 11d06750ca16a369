"""Every pair of features of one iteration that the table of combinations says works is run."""

import copy
from functools import cache

import pytest
import torch
from kit.descriptions import described
from kit.layout_cases import searched
from kit.layouts import CPU, assert_same_step, copies_of, merge, reference_step, run_step
from kit.pairs import pairs_that_work
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_controlled, tiny_dit, tiny_flux, tiny_stable_diffusion

from diffusionpipe.combinations.features import Feature
from diffusionpipe.ir import Range, Sharded
from diffusionpipe.models.parameters.lora import LoraSettings, adapt
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.ordering import Placing
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker

THIS = "tests/runtime/test_combinations.py::test_two_features_learn_what_one_process_learns"
PAIRS = list(pairs_that_work(THIS))
QUICK = [(Feature.FILL, Feature.SHARDED), (Feature.REPLICAS, Feature.TWO_DIRECTIONS)]
BATCH = 16
SCHEDULES = {
    frozenset(): "1f1b",
    frozenset({Feature.SPLIT}): "zb-h1",
    frozenset({Feature.SEVERAL_STAGES}): "interleaved",
    frozenset({Feature.TWO_DIRECTIONS}): "chimera",
    frozenset({Feature.SPLIT, Feature.SEVERAL_STAGES}): "zb-v",
    frozenset({Feature.SPLIT, Feature.TWO_DIRECTIONS}): "dualpipe",
    frozenset({Feature.SEVERAL_STAGES, Feature.TWO_DIRECTIONS}): "bitpipe",
}
"""Schedules with exactly these features."""


def adapted(graph, components):
    adapt(graph, components, LoraSettings(rank=2))
    dtype = next(graph.components["vae"].parameters()).dtype
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=dtype, seed=0)
    return graph


@cache
def prepared(kinds, dtype):
    """A model, its description, inputs, and the step of one process."""
    match next(iter(kinds)) if len(kinds) == 1 else len(kinds):
        case 2:
            graph = adapted(tiny_stable_diffusion(dtype), ["unet", "text_encoder"])
        case Feature.CONTROLNET:
            graph = tiny_controlled(dtype)
        case Feature.TEXT_ENCODER:
            graph = tiny_stable_diffusion(dtype, train=("unet", "text_encoder"))
        case Feature.LORA:
            graph = adapted(tiny_flux(dtype), ["transformer"])
        case _:
            graph = tiny_dit(dtype, transformer={"num_layers": 6})
    inputs = raw_inputs(graph, BATCH)
    autocast = torch.bfloat16 if dtype is torch.float32 else None
    return graph, described(graph, autocast=autocast), inputs, reference_step(graph, inputs)


def layout_of(features):
    """Two ranks in four micro-batches, with these features."""
    names = features & {Feature.SPLIT, Feature.SEVERAL_STAGES, Feature.TWO_DIRECTIONS}
    has_copies = features & {Feature.DATA_PARALLEL, Feature.SHARDED, Feature.BUCKETS}
    orders = None
    if Feature.ORDERS in features:
        orders = searched(Placing.V if Feature.SEVERAL_STAGES in features else Placing.LINEAR)
    return Layout(
        batch=BATCH,
        stages=2,
        microbatches=4,
        encode_chunk=3,
        schedule=SCHEDULES[frozenset(names)],
        orders=orders,
        replicas=(2, 1) if Feature.REPLICAS in features else (),
        data_parallel=2 if has_copies else 1,
        buckets=2 if Feature.BUCKETS in features else 1,
        sharded=Sharded.ALL if Feature.SHARDED in features else Sharded.NONE,
        checkpointed=("*",) if Feature.RECOMPUTE in features else (),
        encoders="host" if Feature.OFFLOAD in features else "device",
    )


def halves(unfilled):
    """Each worker runs half of the frozen layers at the start of the iteration and half in its middle."""
    schedule, num_layers = unfilled.schedule, len(unfilled.blocks[-1])
    batch = sum(pipeline.num_samples for pipeline in schedule.placement.pipelines)
    borders = [worker * batch // schedule.num_workers for worker in range(schedule.num_workers + 1)]
    return {
        worker: [
            PlacedFill(position=position, component="", layers=layers, samples=Range(*borders[worker : worker + 2]))
            for position, layers in (
                (0, Range(0, num_layers // 2)),
                (len(order) // 2, Range(num_layers // 2, num_layers)),
            )
        ]
        for worker, order in enumerate(schedule.orders)
    }


@pytest.mark.parametrize(("one", "other"), quick_and_slow(PAIRS, quick=QUICK), ids=str)
def test_two_features_learn_what_one_process_learns(one, other):
    features = frozenset({one, other})
    kinds = features & {Feature.CONTROLNET, Feature.TEXT_ENCODER, Feature.LORA}
    is_narrow = Feature.BFLOAT16 in features
    dtype = torch.float32 if is_narrow else torch.float64
    graph, model, inputs, expected = prepared(kinds, dtype)
    plan = build_plan(model, layout_of(features), filler=halves if Feature.FILL in features else None)
    own = None if Feature.SHARDED in features else copies_of(graph, plan.mesh.num_ranks)

    def main(rank, transport):
        mine = own[rank] if own else copy.deepcopy(graph)
        precision = Precision(autocast=torch.bfloat16 if is_narrow else None)
        worker = build_worker(mine, model, plan, rank, transport, device=CPU, precision=precision)
        if worker.prologue is not None:
            offset = worker.place.group * (BATCH // plan.mesh.data_parallel)
            rows = slice(offset + worker.encoded.start, offset + worker.encoded.stop)
            worker.feed(worker.prologue, {name: value[rows] for name, value in inputs.items()})
            worker.prologue.run()
        return run_step(worker, inputs)

    found = merge(run_threads(plan.mesh.num_ranks, main))
    if is_narrow:
        assert_near(found, expected)
    else:
        assert_same_step(found, expected)


def assert_near(found, expected):
    """As near as bfloat16 is to float32."""
    assert found.loss == pytest.approx(expected.loss, rel=0.02)
    assert found.gradients.keys() == expected.gradients.keys()
    total = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    assert all((found.gradients[name] - g).norm() <= 0.05 * total for name, g in expected.gradients.items())

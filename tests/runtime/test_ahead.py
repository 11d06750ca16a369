"""Encoding ahead changes nothing: the same losses and gradients as encoding each batch before its first forward."""

from dataclasses import replace

import pytest
import torch
from kit.descriptions import described
from kit.layout_cases import scattered
from kit.layouts import assert_same_step, reference_step, steps_ahead
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.ir import Op
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.engine.executor import sources_of

BATCH = 16
MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}


LAYOUTS = {
    "one stage": Layout(batch=BATCH, stages=1, microbatches=2),
    "two stages": Layout(batch=BATCH, stages=2, microbatches=4),
    "replicas": Layout(batch=BATCH, stages=3, microbatches=4, schedule="gpipe", replicas=(2, 1, 1)),
    "two pipelines": Layout(batch=BATCH, stages=2, microbatches=2, data_parallel=2),
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("model_name", "layout"), quick_and_slow(CASES, quick=[("dit", "two pipelines"), ("stable diffusion", "replicas")])
)
def test_steps_with_frozen_work_scattered_over_the_iteration_are_those_of_one_process(model_name, layout):
    graph = MODELS[model_name]()
    model = described(graph)
    batches = [raw_inputs(graph, BATCH, seed) for seed in range(4)]
    expected = [reference_step(graph, inputs) for inputs in batches[:-1]]
    for seed in range(3):
        plan = build_plan(model, LAYOUTS[layout], filler=scattered(seed))
        for found, reference in zip(steps_ahead(graph, model, plan, batches), expected, strict=True):
            assert_same_step(found, reference)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_forward_awaits_encoders_only_where_their_outputs_are_of_its_own_iteration(is_ahead):
    plan = build_plan(described(tiny_stable_diffusion()), LAYOUTS["two stages"], filler=scattered(0))
    placement = plan.train.placement
    pipelines = tuple(replace(one, is_ahead=one.is_ahead and is_ahead) for one in placement.pipelines)
    schedule = replace(plan.train, placement=replace(placement, pipelines=pipelines))
    trained, frozen = placement.pipelines
    first, second = (placement.stages[stage].worker for stage in trained.stages)
    encoders = {placement.stages[stage].worker for stage in frozen.stages}
    assert encoders == {first, second}
    for stage, worker, before in ((trained.stages[0], first, set()), (trained.stages[1], second, {first})):
        sources = sources_of(schedule, worker, lambda worker: worker)
        found = [set(ranks) for action, ranks in sources.items() if action.op is Op.F and action.stage == stage]
        awaited = before if is_ahead else before | encoders - {worker}
        assert found == [awaited] * len(trained.microbatches)


def test_the_first_batch_is_encoded_bit_for_bit_as_all_others():
    graph = tiny_stable_diffusion(torch.float32)
    model = described(graph)
    plan = build_plan(model, Layout(batch=BATCH, stages=2, microbatches=4), filler=scattered(1))
    inputs = raw_inputs(graph, BATCH)
    first, second, third = steps_ahead(graph, model, plan, [inputs] * 4)
    assert first.loss == second.loss == third.loss
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)

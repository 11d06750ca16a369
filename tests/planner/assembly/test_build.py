import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly.layout import Unfilled
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.timing.legal import check

PROFILE = synthetic.unet()
SETTING = Setting(profile=PROFILE, cluster=synthetic.cluster(8), workload=synthetic.workload(16))


def plan_of(*, filler=None, **layout):
    layout = Layout(**{"batch": 16, "stages": 2, "microbatches": 2, **layout})
    return build_plan(PROFILE.graph, layout, pricing=pricing_of(SETTING), filler=filler)


@pytest.mark.parametrize("replicas", [(), (2, 1)])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_plans_in_buckets_are_legal_and_hold_every_layer_once(replicas, data_parallel):
    plan = plan_of(buckets=3, replicas=replicas, data_parallel=data_parallel)
    for schedule in (plan.train, plan.validate, *plan.sample):
        check(schedule)
    assert len(plan.blocks) == 2 * 3 + 1
    assert [name for block in plan.blocks[:-1] for name in block] == list(PROFILE.graph.backbone_layers)


def test_buckets_of_a_stage_have_about_equal_gradients():
    plan = plan_of(stages=1, buckets=4, data_parallel=2)
    sizes = {p.name: p.shape[0] for p in PROFILE.graph.parameters if p.is_trainable}
    owned = {layer.name: sum(sizes.get(name, 0) for name in layer.parameters) for layer in PROFILE.graph.layers}
    blocks = [sum(owned[name] for name in block) for block in plan.blocks[:-1]]
    assert max(blocks) < 1.5 * sum(blocks) / 4


def test_every_bucket_is_reduced_after_its_last_backward():
    plan = plan_of(stages=1, buckets=4, data_parallel=2, microbatches=2)
    order = [a for a in plan.train.orders[0] if a.op in (Op.B, Op.REDUCE_GRAD)]
    assert [str(a) for a in order[-8:]] == [
        text for stage in (3, 2, 1, 0) for text in (f"{stage}B1", f"{stage}REDUCE_GRAD")
    ]


def test_the_mesh_has_the_layouts_adjacent_groups():
    mesh = plan_of(data_parallel=2, adjacent=2).mesh
    assert (mesh.data_parallel, mesh.pipeline, mesh.adjacent) == (2, 2, 2)


def test_wrong_buckets_and_adjacent_groups_are_refused_together():
    with pytest.raises(ConfigError) as error:
        plan_of(buckets=40, data_parallel=2, adjacent=3)
    assert "3 adjacent copies of 2 data-parallel groups" in str(error.value)
    assert "use at most 24 buckets" in str(error.value)


def test_a_stage_with_too_few_layers_for_its_buckets_is_named():
    second = PROFILE.graph.backbone_layers[1]
    with pytest.raises(ConfigError, match=r"3 buckets cannot be made of the 1 layers of a stage.*time"):
        plan_of(splits=(second,), buckets=3)


def test_a_filled_plan_works_ahead_and_has_a_prologue():
    plan = plan_of(filler=filler_of(SETTING))
    for schedule in (plan.train, plan.prologue, plan.validate, *plan.sample):
        check(schedule)
    assert any(pipeline.is_ahead for pipeline in plan.train.placement.pipelines)
    assert not any(pipeline.is_ahead for pipeline in plan.validate.placement.pipelines)


def test_the_filler_sees_the_schedule_with_reductions_and_its_times():
    seen: list[Unfilled] = []
    fill = filler_of(SETTING)

    def spy(unfilled: Unfilled):
        seen.append(unfilled)
        return fill(unfilled)

    plan_of(filler=spy, data_parallel=2)
    (unfilled,) = seen
    assert not unfilled.schedule.fills
    assert any(action.op is Op.REDUCE_GRAD for _, action in unfilled.schedule.actions())
    assert unfilled.timeline.makespan > 0
    assert unfilled.blocks[-1] == PROFILE.graph.frozen_layers
    assert len(unfilled.costs.stages) == 2


def test_too_many_stages_are_refused_without_a_word_on_buckets():
    with pytest.raises(ConfigError, match="use at most") as error:
        plan_of(stages=1000)
    assert "1000 stages" in str(error.value)
    assert "bucket" not in str(error.value)

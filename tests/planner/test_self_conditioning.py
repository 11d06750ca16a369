"""The planner counts the passes without gradients of a denoiser that reads its own estimate."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.ir import Op
from diffusionpipe.planner import Layout, plan_from_profile
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.rivals.baselines import data_parallel
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search


def setting_of(share, *, ranks=4, batch=32, forward_only=None, times=(0.1,) * 12):
    profile = synthetic.chain(times, parameters=[100] * 12, frozen=0.3)
    if share is not None:
        profile = synthetic.conditioned(profile, share)
    if forward_only is not None:
        profile = synthetic.with_forward_only(profile, forward_only)
    return Setting(profile=profile, cluster=synthetic.cluster(ranks), workload=synthetic.workload(batch))


def candidate_of(microbatches=4):
    return Candidate(
        arrangement=Arrangement(data_parallel=1, units=4),
        schedule="1f1b",
        microbatches=microbatches,
        starts=(0, 3, 6, 9),
        replicas=(1,) * 4,
    )


def test_without_conditioned_samples_the_plan_is_that_of_a_plain_model():
    plain, never = (search(setting_of(share)) for share in (None, 0.0))
    (one, first), (other, second) = plain.winner, never.winner
    assert one == other
    assert (first.train, first.step, first.iteration) == (second.train, second.step, second.iteration)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("part", [None, 0.75])
def test_a_plan_takes_longer_by_the_probes_work(share, part):
    """A probe takes a forward's time or, where it was measured, that of a forward without gradients."""
    settings = setting_of(None), setting_of(share, forward_only=part)
    plain, probed = (propose(s, candidate_of().layout(s)) for s in settings)
    forward = (part or 1.0) * 3 * 0.1 * 8 + 3 * 5e-5
    added = probed.timeline.makespan - plain.timeline.makespan
    assert added == pytest.approx(share * 4 * forward, rel=0.02), (added, forward)


def test_probes_hold_nothing():
    plain, probed = (propose(s, candidate_of().layout(s)) for s in (setting_of(None), setting_of(0.5)))
    for one, other in zip(plain.memory, probed.memory, strict=True):
        assert other.activations - one.activations in (0, 8 * 400, 4 * 8 * 400), "the first stage keeps the estimate"
        assert replace(other, activations=0, messages=0) == replace(one, activations=0, messages=0)


def test_the_search_counts_probes_in_every_plan_and_rival():
    setting = setting_of(1.0)
    _, best = search(setting).winner
    judge, plain = Judge(setting=setting), Judge(setting=setting_of(None))
    assert best.step <= data_parallel(judge, is_overlapped=True).step
    ours, theirs = (one.tables.table.sums(8, 4) for one in (judge, plain))
    assert ours.forward[-1] == pytest.approx(2 * theirs.forward[-1])
    assert (ours.backward, ours.layers) == (theirs.backward, theirs.layers)


def test_only_probes_take_what_forwards_without_gradients_were_measured_to_take():
    setting, same = setting_of(0.5, forward_only=0.75), setting_of(0.5)
    layout = candidate_of().layout(setting)
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs, before = (costs_of(schedule, blocks, layout.mesh, one) for one in (setting, same))
    for stage, (own, other) in enumerate(zip(costs.stages, before.stages, strict=True)):
        if schedule.placement.is_frozen(stage):
            continue
        part = 0.75 if schedule.placement.pipeline_of(stage).is_probe else 1.0
        assert own.forward == pytest.approx(part * other.forward)
        assert replace(own, forward=other.forward) == other
    ours, plain = (one.table.sums(8, 4) for one in (setting, setting_of(None)))
    assert ours.forward[-1] == pytest.approx((1 + 0.5 * 0.75) * plain.forward[-1])


def test_cuts_by_time_count_probes_as_they_were_measured():
    """A first layer of long forwards and short backwards: how long its probe takes decides where the cut is."""

    def cut(part):
        profile = setting_of(1.0, forward_only=part, times=(1.0, 0.2, 0.2, 0.2, 0.2, 0.2)).profile
        first = replace(profile.layer("layer0"), weight_grad=(1e-3,) * len(profile.batch_sizes))
        profile = replace(profile, layers=tuple(first if one.name == "layer0" else one for one in profile.layers))
        return plan_from_profile(profile, Layout(batch=32, stages=2, microbatches=4)).blocks[1][0]

    assert [cut(part) for part in (None, 1.0, 0.1)] == ["layer2", "layer2", "layer3"]


def test_fills_stand_between_probes_too():
    setting = setting_of(0.5)
    proposal = propose(setting, candidate_of().layout(setting), filler_of(setting))
    placement = proposal.train.placement
    probes = {stage for pipeline in placement.pipelines if pipeline.is_probe for stage in pipeline.stages}
    (order,) = (order for worker, order in enumerate(proposal.train.orders) if worker == 3)
    first_probe = next(i for i, action in enumerate(order) if action.stage in probes and action.op is Op.F)
    assert any(action.op is Op.ENCODE for action in order[:first_probe]), "while the first probe is on its way"

"""Other systems train two backbones one after the other."""

import pytest
from planner import synthetic

from benchmarks.cascade.joining import joined_profile
from benchmarks.cascade.rivals import divisions, parts, replicated_spp, rivals
from diffusionpipe.holding import Workload
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel, pipeline, places, spp_starts
from diffusionpipe.planner.search.judge import Judge


def pair():
    return joined_profile({
        "base": synthetic.chain([0.1] * 4, frozen=0.1), "super_resolution": synthetic.chain([0.2] * 4, frozen=0.1)
    })  # fmt: skip


def test_each_part_has_one_backbone_and_the_first_has_the_encoders():
    profile = pair()
    first, second = parts(profile)
    assert first.graph.frozen_layers == profile.graph.frozen_layers
    assert second.graph.frozen_layers == ()
    trained = [layer for part in (first, second) for layer in part.graph.backbone_layers]
    assert tuple(trained) == profile.graph.backbone_layers


def test_pipelines_in_turn_take_the_time_of_both_and_copies_are_tuned():
    setting = Setting(profile=pair(), cluster=synthetic.cluster(4), workload=Workload(batch=8))
    steps = {one.name: one.step for one in rivals(setting)}
    assert {"DDP", "ZeRO-3 / FSDP", "DDP, cached outputs", "GPipe in turn", "1F1B + SPP in turn"} <= steps.keys()
    alone = Setting(profile=list(parts(pair()))[1], cluster=setting.cluster, workload=setting.workload)
    longer = {one.name: one.step for one in rivals(alone)}
    for name in ("GPipe in turn", "1F1B + SPP in turn"):
        assert longer[name] < steps[name] < 2 * longer[name]  # the first backbone has half the work


def test_stages_of_spp_have_replicas_where_a_layer_takes_twice_as_long_as_the_other():
    profile = synthetic.chain([0.1, 0.1, 0.4])
    setting = Setting(profile=profile, cluster=synthetic.cluster(3), workload=Workload(batch=24))
    best = replicated_spp(Judge(setting=setting))
    assert best.candidate.replicas == (1, 2)
    assert best.step < pipeline(Judge(setting=setting), "SPP", "1f1b", spp_starts, places(Judge(setting=setting))).step


def test_divided_copies_take_as_long_as_the_slower_backbone_and_the_encoders():
    setting = Setting(profile=pair(), cluster=synthetic.cluster(4), workload=Workload(batch=8))
    assert list(divisions(setting)) == [2]
    one = {rival.name: rival for rival in rivals(setting)}["DDP, divided"]
    half = Setting(profile=list(parts(pair()))[1], cluster=synthetic.cluster(2), workload=setting.workload)
    assert one.layout == "2 + 2 copies"
    assert one.step == pytest.approx(one.frozen + data_parallel(Judge(setting=half), is_overlapped=True).step)

"""Other systems train two backbones one after the other."""

from planner import synthetic

from benchmarks.cascade.rivals import parts, rivals
from diffusionpipe.costs import Workload
from diffusionpipe.costs.joining import joined_profile
from diffusionpipe.planner.pricing.setting import Setting


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

from dataclasses import replace

from planner import synthetic

from benchmarks.rivals.replicated import REPLICATED_SPP, replicated_spp
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import pipeline, places, spp_starts
from diffusionpipe.planner.search.judge import Judge


def judge(batch=64):
    profile = synthetic.chain([0.5, 0.5, 6.0, 0.5, 0.5], parameters=[10**6] * 5, frozen=0.1)
    return Judge(
        setting=Setting(profile=profile, cluster=synthetic.cluster(4, memory=80.0), workload=synthetic.workload(batch))
    )


def test_replicas_let_spp_share_a_layer_that_no_cut_divides():
    """Six of eight seconds are in one layer: with one rank a stage three stages wait for it."""
    found = replicated_spp(judge())
    plain = pipeline(judge(), "1F1B + SPP", "1f1b", spp_starts, places(judge()))
    assert found.name == REPLICATED_SPP
    assert max(found.candidate.replicas) > 1
    assert found.step < plain.step


def test_a_batch_that_cannot_be_shared_has_no_such_pipeline():
    one = judge()
    small = replace(one.setting, cluster=synthetic.cluster(1, memory=80.0))
    assert replicated_spp(Judge(setting=small)) is None

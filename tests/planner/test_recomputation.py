from dataclasses import replace

import pytest
from golden.plans import recorded_profile

from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.best import PASSES
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.workflows.planning.stated_setting import stated_setting


def setting(memory, batch=32, devices=1):
    cluster = with_memory(load_cluster(f"a100-80x{devices}"), round(memory * GIB))
    return stated_setting(
        recorded_profile("sd-2.1-a100-80"), cluster, batch, checkpoint=(), has_ema=False, optimizer="AdamW"
    )


def test_all_layers_are_recomputed_only_where_that_is_faster_or_fits():
    roomy, short = setting(75), setting(15.2)
    assert choose(roomy, may_recompute=True).setting.workload.checkpointed == ()
    with pytest.raises(ConfigError, match="No layout fits"):
        choose(short)
    found = choose(short, may_recompute=True)
    assert found.setting.workload.checkpointed == ("*",)
    assert set(found.plan().checkpointed) == set(short.graph.backbone_layers)
    assert found.proposal.overflow <= 0


def test_advice_begins_with_the_training_that_recomputes():
    with pytest.raises(ConfigError) as caught:
        choose(setting(4), may_recompute=True)
    assert "recompute all layers" not in str(caught.value)


@pytest.mark.parametrize("memory", [75, 30, 22, 18])
def test_one_device_takes_the_fewest_passes_that_fit(memory):
    """Fewer micro-batches are tried here one by one: none of them fits."""
    asked = setting(memory)
    found = choose(asked)
    assert (found.candidate.microbatches == 1) is (memory == 75)
    for count in range(1, found.candidate.microbatches):
        if asked.workload.batch % count:
            continue
        fewer = replace(found.candidate, microbatches=count)
        proposal = propose(found.setting, fewer.layout(found.setting), found.filler)
        assert proposal.overflow > 0 or proposal.step > found.fastest.step * (1 + PASSES)

import pytest
from planner import synthetic

from diffusionpipe.ir import Sharded
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.naming import name_of, name_of_plan, sizes_of, sizes_of_plan

LAYERS = 16


def candidate_of(
    schedule="1f1b", *, stages=4, workers=None, replicas=None, groups=1, microbatches=4, buckets=1, **more
):
    replicas = replicas or (1,) * (workers or stages)
    return Candidate(
        arrangement=Arrangement(units=sum(replicas), data_parallel=groups, adjacent=more.pop("adjacent", 1)),
        schedule=schedule, microbatches=microbatches, starts=tuple(range(stages)), replicas=replicas, buckets=buckets,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (candidate_of(), "1f1b, 4 stages, 4 micro-batches"),
        (candidate_of(groups=4, adjacent=4), "1f1b, 4 stages x 4 groups side by side, 4 micro-batches"),
        (candidate_of(stages=3, replicas=(1, 1, 2)), "1f1b, 3 stages (1,1,2 replicas), 4 micro-batches"),
        (candidate_of("zb-v", stages=8, workers=4), "zb-v, 8 stages on 4 ranks, 4 micro-batches"),
        (candidate_of("dualpipe", microbatches=8), "dualpipe, 4 stages, 8 micro-batches"),
        (candidate_of("interleaved", stages=4, workers=2), "interleaved, 4 stages on 2 ranks, 4 micro-batches"),
        (candidate_of(stages=1, groups=4, microbatches=1), "data parallel, 4 copies"),
        (candidate_of(stages=1, groups=4, buckets=3, sharded=Sharded.ALL),
         "sharded data parallel, 4 copies, 4 micro-batches, 3 buckets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_plan_is_called_as_the_candidate_that_it_was_made_of(candidate, words):
    assert f"{name_of(candidate)}, {sizes_of(candidate)}" == words
    profile = synthetic.chain([0.01] * LAYERS)
    setting = Setting(profile=profile, cluster=synthetic.cluster(16), workload=synthetic.workload(64))
    layout = candidate.layout(setting)
    assert isinstance(layout, Layout)
    plan = build_plan(profile.graph, layout)
    assert f"{name_of_plan(plan)}, {sizes_of_plan(plan)}" == words

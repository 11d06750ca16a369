"""Where links are slow, messages have an order by times with queues; estimates count with the same order."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest
from planner import synthetic

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Edge
from diffusionpipe.passes import communicate, connect_blocks
from diffusionpipe.planner.assembly.queued import in_queues
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

FAMILIES = {"1f1b": 1, "zb-h1": 1, "zb-2p": 1, "interleaved": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "hanayo": 2}
"""Family -> stages of a worker."""


def setting_of(gigabits: float) -> Setting:
    """A U-Net on four nodes with one device each, over links of so many Gb/s."""
    cluster = synthetic.cluster(4, per_node=1)
    links = {name: replace(getattr(cluster, name), bandwidth=gigabits * 1e8) for name in ("inter", "inter_reduce")}
    return Setting(profile=synthetic.unet(), cluster=replace(cluster, **links), workload=synthetic.workload(32))


def candidate_of(setting: Setting, family: str, microbatches: int, random: Random) -> Candidate:
    """Four pipeline ranks, cut at about even places."""
    num_layers, blocks = len(setting.table.names), 4 * FAMILIES[family]
    places = sorted(round(i * num_layers / blocks + random.uniform(-2, 2)) for i in range(1, blocks))
    return Candidate(
        arrangement=Arrangement(data_parallel=1, units=4),
        schedule=family,
        microbatches=microbatches,
        starts=(0, *(min(num_layers - 1, max(1, place)) for place in places)),
        replicas=(1,) * 4,
    )


def chained(family: str, microbatches: int):
    """A family's schedule of three workers in which each block reads the tensor of the one before it."""
    schedule = REGISTRY[family](3, microbatches)
    blocks = 1 + max(stage.weights for stage in schedule.placement.stages)
    edges = [Edge(producer=b, consumer=b + 1, tensors=("x",), gradients=("x",)) for b in range(blocks - 1)]
    return connect_blocks(schedule, edges)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_order_is_slower_than_the_one_by_times_without_queues(family):
    schedule, random = chained(family, 6), Random(family)
    stages = tuple(
        StageCosts(forward=random.randint(1, 4), input_grad=2, weight_grad=2) for _ in schedule.placement.stages
    )
    for bandwidth in (0.3, 1.0, 1e9):
        free = uniform_costs(schedule)
        costs = replace(free, stages=stages, tensor_bytes={"x": 1}, link=replace(free.link, bandwidth=bandwidth))
        explicit = in_queues(schedule, costs)
        check(explicit)
        first = communicate(schedule, simulate(schedule, costs))
        assert simulate(explicit, costs).makespan <= simulate(first, costs).makespan
        if bandwidth > 1:
            assert explicit == first


def test_estimates_agree_with_simulations_where_messages_wait():
    """With fills and without, on links of 5 to 30 Gb/s."""
    errors, exact = [], []
    for seed in range(24):
        random = Random(seed)
        setting = setting_of(random.choice((5, 8, 10, 15, 20, 30)))
        candidate = candidate_of(setting, random.choice(list(FAMILIES)), random.choice((4, 8, 16)), random)
        estimates, layout = Judge(setting=setting).estimates, candidate.layout(setting)
        for is_filled, found in ((True, errors), (False, exact)):
            estimate = estimates.estimate(candidate, is_filled=is_filled).iteration
            plan = propose(setting, layout, filler_of(setting) if is_filled else None)
            found.append(estimate / plan.iteration - 1)
    assert max(map(abs, exact)) < 1e-9
    assert median(map(abs, errors)) < 0.03
    assert min(errors) > -0.02
    assert max(errors) < 0.10

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly.layout import Unfilled
from diffusionpipe.planner.filling.filler import filler_of, hosts_and_chunk
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import pricing_of, propose

MB = 10**6
LAYOUT = Layout(batch=16, stages=2, microbatches=4, splits=("layer2",))


def setting(memories, *, elements: int = 10, frozen_parameters: int = 20 * MB) -> Setting:
    """Two stages with 32 MB of weights and optimizer each, and encoders with 40 MB."""
    profile = synthetic.chain(
        [1.0] * 4, parameters=[MB] * 4, elements=elements, frozen=0.1, frozen_parameters=frozen_parameters
    )
    cluster = synthetic.cluster(len(memories))
    devices = tuple(replace(one, memory=m * MB) for one, m in zip(cluster.devices, memories, strict=True))
    return Setting(profile=profile, cluster=replace(cluster, devices=devices), workload=synthetic.workload(16))


def asked(case: Setting):
    """What `hosts_and_chunk` says of the layout."""
    answers = []

    def filler(unfilled: Unfilled):
        answers.append(hosts_and_chunk(case, unfilled))
        return filler_of(case)(unfilled)

    propose(case, LAYOUT, filler)
    return answers[0]


def test_with_room_everywhere_all_workers_encode_with_the_largest_chunk():
    assert asked(setting([80, 80])) == (None, 16)


@pytest.mark.parametrize(("memories", "hosts"), [([80, 50], (0,)), ([50, 80], (1,))])
def test_a_worker_without_room_for_the_encoders_leaves_them_to_the_other(memories, hosts):
    case = setting(memories)
    assert asked(case) == (hosts, 16)
    proposal = propose(case, LAYOUT, filler_of(case))
    assert proposal.overflow <= 0
    assert [use.frozen > 0 for use in proposal.memory] == [worker in hosts for worker in (0, 1)]


def test_the_plan_encodes_everything_on_the_host():
    case = setting([80, 50])
    plan = build_plan(case.graph, LAYOUT, pricing=pricing_of(case), filler=filler_of(case))
    stages = plan.train.placement.stages
    assert {stages[fill.stage].worker for fill in plan.train.fills} == {0}
    assert sum(len(fill.samples) for fill in plan.train.fills) == 16


def test_smaller_chunks_go_before_fewer_hosts():
    # A sample takes 2 MB while it is encoded, and 32 MB are held of the outputs of both batches at the least.
    case = setting([180, 180], elements=MB, frozen_parameters=MB)
    hosts, chunk = asked(case)
    assert hosts is None
    assert chunk < 16
    assert asked(setting([400, 400], elements=MB, frozen_parameters=MB)) == (None, 16)


def test_with_room_nowhere_all_encode_and_the_plan_says_by_how_much_it_is_too_large():
    case = setting([50, 50])
    assert asked(case) == (None, 1)
    assert propose(case, LAYOUT, filler_of(case)).overflow > 0


LARGE = {"elements": MB, "frozen_parameters": MB}


@pytest.mark.parametrize(
    ("memories", "sizes"),
    [([80, 80], {}), ([80, 50], {}), ([50, 80], {}), ([50, 50], {}), ([180, 180], LARGE), ([400, 400], LARGE)],
)
def test_estimates_ask_the_same_hosts_and_chunk(memories, sizes):
    case = setting(memories, **sizes)
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=1, units=2),
        schedule="1f1b",
        microbatches=4,
        starts=(0, 2),
        replicas=(1, 1),
    )
    judge = Judge(setting=case)
    assert judge.footprint.hosts_and_chunk(candidate) == asked(case)
    estimate = judge.estimates.estimate(candidate, is_filled=True).iteration
    assert propose(case, LAYOUT, filler_of(case)).iteration == pytest.approx(estimate, rel=0.06)

import re
from importlib.resources import files
from pathlib import Path

import pytest
from planner import synthetic

import diffusionpipe as dp
from diffusionpipe.costs.files import read_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import plain_states
from diffusionpipe.ir.files import plan_to_text
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.timing.legal import check

PROFILE = Path(__file__).parents[1] / "files" / "profile.json"
CLUSTER = "rtx4090x2"


@pytest.fixture(scope="module")
def profile():
    return read_profile(PROFILE)


def test_the_plan_is_the_planners(profile):
    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.holding import Workload

    found = dp.plan(profile, cluster=CLUSTER, batch=16, stages=2, optimizer="SGD")
    workload = Workload(batch=16, states=plain_states(optimizer=0))
    given = Given(stages=2)
    choice = choose(Setting(profile=profile, cluster=load_cluster(CLUSTER), workload=workload, given=given), fill=False)
    assert plan_to_text(found.plan) == plan_to_text(choice.plan())
    assert (found.step, found.timeline.makespan) == (choice.step, choice.proposal.timeline.makespan)
    assert choice.comparison().verdict in found.why


def test_the_table_has_a_line_for_each_layout_and_the_plan_among_them(profile):
    found = dp.plan(profile, cluster=CLUSTER, batch=16)
    head, *rows = found.table().splitlines()
    assert head.split() == ["layout", "step", "ms", "idle", "peak"]
    assert len(rows) == len(found.rows)
    assert f"{found.step * 1e3:.3f}" in found.table()


def test_own_orders_are_planned_as_they_are(profile):
    order = dp.schedule(lambda p, m: ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"], ranks=2, microbatches=2)
    found = dp.plan(profile, cluster=CLUSTER, batch=16, schedule=order)
    computed = [[str(a) for a in row if a.op in "FB"] for row in found.plan.train.orders]
    assert computed == [[str(action) for action in row] for row in order.orders]
    assert len(found.rows) == 1


def test_replicas_without_microbatches_get_the_fastest_number(profile):
    every = [dp.plan(profile, cluster=CLUSTER, batch=4, replicas=(2,), microbatches=count).step for count in (1, 2)]
    found = dp.plan(profile, cluster=CLUSTER, batch=4, replicas=(2,))
    assert found.step == min(every)
    assert f"the fastest of {len(every)} numbers of micro-batches" in found.why


def test_replicas_are_cut_for_the_shares_of_their_devices():
    """Cut by work alone each stage would have half of it, though one has three devices and the other one."""
    profile = synthetic.chain([0.01] * 8, parameters=[1000] * 8)
    found = dp.plan(profile, cluster=synthetic.cluster(4), batch=12, replicas=(3, 1))
    first, second, *_ = found.plan.blocks
    assert len(first) >= 3 * len(second)
    free = dp.plan(profile, cluster=synthetic.cluster(4), batch=12, schedule="1f1b", stages=4)
    assert found.step < 1.3 * free.step


def test_replicas_without_a_common_divisor_share_each_micro_batch():
    """A stage with two replicas and one with three: micro-batches of training and of drawing are multiples of six."""
    profile = synthetic.chain([0.01, 0.02, 0.01], parameters=[1000] * 3)
    for replicas in ((2, 3), (3, 2)):
        found = dp.plan(profile, cluster=synthetic.cluster(5), batch=12, replicas=replicas)
        for schedule in (found.plan.train, found.plan.validate, *found.plan.sample):
            check(schedule)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cluster": "cpux2"}, "the profile: this profile was made on NVIDIA GeForce RTX 4090, but the cluster cpux2"),
        ({"cluster": "cpux3"}, "there is no cluster 'cpux3'"),
        ({"batch": 0}, "batch=0: give a number of at least 1"),
        ({"microbatches": 0, "stages": -1}, "stages=-1, microbatches=0: give a number"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"optimizer": "AdamX"}, "there is no optimizer 'AdamX'"),
        ({"replicas": (1, 1, 2)}, "needs 4 ranks for a pipeline, but the cluster rtx4090x2 has 2"),
        ({"replicas": (1, 0)}, "give a number of at least 1 for each stage"),
        ({"replicas": 2}, "replicas=2: give the number of devices of each stage, e.g. (1, 2)"),
        ({"replicas": (1.5, 1)}, "replicas[0]=1.5: give a whole number"),
        ({"batch": None}, "batch=None: give the number of samples"),
        ({"batch": 2.5, "stages": "2"}, "batch=2.5, stages='2': give a whole number from 1 to 1,000,000"),
        ({"batch": 10**7}, "batch=10000000: give a whole number"),
        ({"fill": "x"}, "fill='x': give True or False"),
        ({"schedule": "1f1b", "stages": 3}, "2 ranks cannot form pipelines of 3 stages"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(profile, options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        dp.plan(profile, **{"cluster": CLUSTER, "batch": 16, **options})


def test_a_cluster_may_be_a_path_and_a_plan_takes_nothing_but_profiles(profile, tmp_path):
    path = tmp_path / "two.json"
    path.write_text((files("diffusionpipe.costs.clusters") / f"{CLUSTER}.json").read_text())
    assert dp.plan(profile, cluster=path, batch=16, stages=2).step > 0
    with pytest.raises(ConfigError, match=r"dp\.plan takes a profile or the path of one, not a int"):
        dp.plan(3, cluster=CLUSTER, batch=16)


def test_orders_of_another_size_are_refused(profile):
    order = dp.schedule("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="microbatches=4, but the schedule '1f1b' is for 2; leave it out"):
        dp.plan(profile, cluster=CLUSTER, batch=16, schedule=order, microbatches=4)
    with pytest.raises(ConfigError, match="a batch of 9 cannot be cut into 2"):
        dp.plan(profile, cluster=CLUSTER, batch=9, schedule=order)

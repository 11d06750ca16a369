"""Plans that fill a device almost warn, and the plan for less memory that they name is what the planner chooses."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.choice import choose, with_alternatives
from diffusionpipe.planner.choosing.leaner import FULL, SLOWER, is_full, leanest
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.planner.pricing.setting import Setting


def setting_of(memory_gb, *, intra_gb=5.0):
    profile = synthetic.chain([0.01] * 3, parameters=[2 * 10**8] * 3, frozen=0.0)
    cluster = synthetic.cluster(2, memory=memory_gb, intra_gb=intra_gb)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(4))


@pytest.fixture(scope="module")
def full():
    """Copies take 9.6 GB; with links this fast nothing is a near-tie of them."""
    choice = choose(setting_of(10.0, intra_gb=90.0))
    assert choice.candidate.is_copy
    return choice


def test_a_plan_that_leaves_enough_does_not_warn():
    choice = choose(setting_of(80.0, intra_gb=90.0))
    assert not is_full(choice)
    assert not any(one.text.startswith("Warning") for one in with_alternatives(choice.comparison(), choice).remarks)


def test_the_plan_that_a_warning_names_is_that_of_whoever_asks_for_so_much_memory(full):
    assert is_full(full)
    assert full.merits.fullness > FULL
    leaner = leanest(full)
    assert leaner is not None
    assert leaner.choice.step <= full.step * (1 + SLOWER)
    cluster = with_memory(full.setting.cluster, leaner.memory)
    asked = best_choice(replace(full.setting, cluster=cluster))
    assert asked is not None
    assert asked.plan() == leaner.choice.plan()
    assert max(use.total for use in asked.proposal.memory) <= leaner.memory
    shown = with_alternatives(full.comparison(), full)
    (remark,) = [one for one in shown.remarks if one.text.startswith("Warning: ")]
    assert "takes 96% of the memory of rank 0, 8.9 of 9.3 GiB" in remark.text
    assert f"{leaner.choice.step * 1e3:.1f} ms a step" in remark.text
    gib = leaner.memory / GIB
    assert remark.way == f"plan --memory {gib:.4g}, or pipeline.memory={gib:.4g} in a recipe"


def test_where_nothing_leaner_is_fast_enough_the_warning_says_so():
    profile = synthetic.chain([0.01] * 3, parameters=[2 * 10**8] * 3, frozen=0.0)
    alone = Setting(profile=profile, cluster=synthetic.cluster(1, memory=10.0), workload=synthetic.workload(1))
    choice = choose(alone)
    assert is_full(choice)
    assert leanest(choice) is None
    (remark,) = with_alternatives(choice.comparison(), choice).remarks
    assert remark.text.endswith("No leaner layout was found whose step takes at most 10% longer.")
    assert remark.way == ""

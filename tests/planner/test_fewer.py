"""Plans on fewer devices, where those that are left out slow the others down."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.costs import PairLink
from diffusionpipe.costs.cluster import of_ranks
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing import fewer as fewer_module
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.choice import choose, with_alternatives
from diffusionpipe.planner.choosing.fewer import choices_of, fewer_devices, least_of
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting


def setting_of(cluster, *, num_layers=6, batch=12, parameters=10**6, frozen=0.004, given=None):
    profile = synthetic.chain([0.01] * num_layers, parameters=[parameters] * num_layers, frozen=frozen)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch), given=given or Given())


SLOW = synthetic.cluster(3, speeds=(1.0, 1e-3, 1.0))


def test_a_device_that_is_a_thousand_times_slower_is_left_out():
    setting = setting_of(SLOW)
    choice = choose(setting)
    shown = with_alternatives(choice.comparison(), choice)
    (row,) = shown.fewer
    assert row.step < choice.step / 100
    (remark,) = [one for one in shown.remarks if one.text.startswith("Without rank 1 a step would be")]
    assert f"{choice.step / row.step:.2f} times as fast" in remark.text
    assert remark.way == "plan --use 0,2, or pipeline.use=[0,2] in a recipe"
    assert choose(replace(setting, cluster=of_ranks(SLOW, (0, 2)))).step == row.step


def test_a_device_behind_a_slow_link_is_left_out():
    slow = synthetic.cluster(4, per_node=2, inter_gb=1e-9, bus_gb=1e-9)
    found = fewer_devices(setting_of(slow, num_layers=3, batch=4, frozen=0.0))
    assert found.ranks == (0, 1)


def test_where_all_devices_help_nothing_else_is_searched(monkeypatch):
    setting = setting_of(synthetic.cluster(4), batch=32)
    choice = choose(setting)
    monkeypatch.setattr(fewer_module, "best_choice", lambda *_, **__: pytest.fail("searched"))
    assert fewer_devices(setting, limit=choice.step / (1 + NEAR_TIE)) is None
    shown = with_alternatives(choice.comparison(), choice)
    assert shown.fewer == ()


def test_a_batch_that_cannot_be_cut_over_all_ranks_is_refused_with_ranks_that_can():
    setting = setting_of(synthetic.cluster(7), num_layers=2, batch=9, frozen=0.0)  # replicas share 9 as 1, 3 or 9
    with pytest.raises(ConfigError, match="cannot be cut over 7 ranks") as caught:
        choose(setting)
    assert "Without rank 6 there is a plan, " in str(caught.value)
    assert str(caught.value).endswith("ms a step: plan --use 0,1,2,3,4,5, or pipeline.use=[0,1,2,3,4,5] in a recipe")


def test_where_nothing_fits_because_of_one_small_device_the_others_are_named():
    cluster = synthetic.cluster(2)
    small = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], memory=10**3)))
    with pytest.raises(ConfigError, match="No layout fits in memory") as caught:
        choose(setting_of(small))
    assert "Without rank 1 there is a plan" in str(caught.value)


def test_given_sizes_are_kept_to_on_fewer_devices_too():
    """Three copies need three devices."""
    assert fewer_devices(setting_of(SLOW, given=Given(data_parallel=3))) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_devices_is_faster_than_the_one_that_is_found_near_ties_apart(seed):
    """Against a search of every choice, without bounds."""
    draw = Random(seed)
    cluster = _drawn(draw)
    sizes = {"num_layers": 3, "batch": draw.choice([4, 6]), "parameters": draw.choice([10**5, 10**7])}
    setting = setting_of(cluster, frozen=draw.choice([0.0, 0.0, 0.004]), **sizes)
    choice = best_choice(setting)
    limit = choice.step / (1 + NEAR_TIE)
    found = fewer_devices(setting, limit=limit)
    ranks = range(cluster.num_ranks)
    steps = [
        own.fastest.step
        for count in ranks[1:]
        for some in combinations(ranks, count)
        if least_of(small := replace(setting, cluster=of_ranks(cluster, some))) < float("inf")
        and (own := best_choice(small))
    ]
    if found is None:
        assert min(steps) >= limit * (1 - 1e-9)
    else:
        assert found.choice.step <= min(steps) * (1 + NEAR_TIE)
        assert found.choice.step < limit


def _drawn(draw):
    num_ranks = draw.choice([3, 4])
    speeds = [draw.choice([0.05, 0.5, 1.0]) for _ in range(num_ranks)]
    return synthetic.cluster(num_ranks, intra_gb=draw.choice([0.001, 0.01, 0.1]), speeds=speeds)


def test_equal_choices_of_devices_are_looked_at_once():
    assert choices_of(synthetic.cluster(4)) == [(0, 1, 2), (0, 1), (0,)]
    pair = PairLink(first=0, second=1, latency=1e-3, bandwidth=1e3)
    assert (0, 2, 3) in choices_of(replace(synthetic.cluster(4), pairs=(pair,)))
    many = choices_of(synthetic.cluster(16, speeds=[0.1, *[1.0] * 15]))
    assert tuple(range(1, 16)) in many
    assert len(many) <= 40

from itertools import product

import pytest
from kit.split_times import EQUAL, SOME_MICROBATCHES, UNEQUAL, simulated, window
from schedules.measures import counts_up_to_64

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.building.split_work import Goal
from diffusionpipe.schedules.families.zb_v import zb_v
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(zb_v(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(zb_v(p, m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_time_and_window_at_equal_times(p):
    for m in (p, p + 1, 2 * p - 1, 3 * p):
        timeline = simulated(zb_v(p, m))
        assert timeline.makespan == 6 * m + p - 1
        assert window(timeline) <= 6 * m + max(0, 2 * p - 1 - m)


@pytest.mark.parametrize("costs", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_a_worker_holds_2p_stages_as_in_1f1b(p, costs):
    for m, objective in product((1, p, 3 * p), Goal):
        assert max(activations_in_flight(zb_v(p, m, costs=costs, objective=objective))) <= 2 * p


def test_unequal_times_are_used():
    p, m = 8, 24
    assumed = simulated(zb_v(p, m), UNEQUAL, 1)
    known = simulated(zb_v(p, m, costs=UNEQUAL, latency=1), UNEQUAL, 1)
    assert known.makespan < assumed.makespan == 1557
    assert 1 - 60 * m / window(known) < 0.0626


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8), (5, 21), (8, 24)])
@pytest.mark.parametrize("latency", [0, 1, 3])
def test_each_objective_is_the_shortest_where_it_is_asked_for(p, m, latency):
    costs = [StageCosts(forward=8 + 3 * s % 5, input_grad=12 - s % 3, weight_grad=7 + s % 4) for s in range(2 * p)]
    short, narrow = (
        simulated(zb_v(p, m, costs=costs, latency=latency, objective=objective), costs, latency)
        for objective in (Goal.MAKESPAN, Goal.WINDOW)
    )
    assert short.makespan <= narrow.makespan
    assert window(narrow) <= window(short)


def test_the_shortest_window_may_be_another_order_than_the_shortest_makespan():
    found = [
        simulated(zb_v(8, 24, costs=UNEQUAL, latency=1, objective=objective), UNEQUAL, 1)
        for objective in (Goal.MAKESPAN, Goal.WINDOW)
    ]
    assert [(timeline.makespan, window(timeline)) for timeline in found] == [(1551, 1536), (1556, 1526)]


def test_stages_may_have_different_costs_and_activations():
    costs = [StageCosts(forward=1 + s % 3, weight_grad=2 - s % 2, activation=1 + s % 4) for s in range(8)]
    schedule = zb_v(4, 9, costs=costs, latency=1)
    check(schedule)
    assert simulated(schedule, costs, 1).makespan <= simulated(zb_v(4, 9), costs, 1).makespan


def test_a_wrong_number_of_costs_is_refused():
    with pytest.raises(ConfigError, match="4 costs for 8 stages"):
        zb_v(4, 8, costs=[EQUAL] * 4)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        zb_v(*sizes)

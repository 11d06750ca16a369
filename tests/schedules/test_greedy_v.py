import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.split_times import UNEQUAL, simulated, window
from kit.strategies import durations

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.building.greedy_v import greedy_orders
from diffusionpipe.schedules.building.shapes import wave
from diffusionpipe.schedules.building.split_work import SplitWork, peaks, schedule_of_work
from diffusionpipe.timing.legal import check

times = st.one_of(durations, st.just(0), st.floats(0.001, 9))


@st.composite
def stage_costs(draw):
    activation = draw(st.integers(0, 5))
    return StageCosts(
        forward=draw(times),
        input_grad=draw(times),
        weight_grad=draw(times),
        activation=activation,
        kept_after_input_grad=draw(st.integers(0, activation)),
    )


def work_of(p, m, costs, latency, room):
    """Over a V; `room` by worker is memory beyond what one micro-batch needs."""
    limits = tuple(costs[i].activation + costs[2 * p - 1 - i].activation + room[i] for i in range(p))
    return SplitWork(workers=wave(p, 2), num_microbatches=m, costs=tuple(costs), latency=latency, limits=limits)


def equal(p, m, limit, costs=UNEQUAL, latency=1):
    return work_of(p, m, [costs] * (2 * p), latency, [limit - 2] * p)


@st.composite
def works(draw):
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    costs = draw(st.lists(stage_costs(), min_size=2 * p, max_size=2 * p))
    room = draw(st.lists(st.integers(0, 30), min_size=p, max_size=p))
    return work_of(p, m, costs, draw(times), room)


def windows(work):
    found = []
    for orders in greedy_orders(work):
        schedule = schedule_of_work("greedy", work, orders, 1)
        found.append(window(simulated(schedule, work.costs, work.latency)))
    return found


@given(works())
def test_any_costs_and_limits_give_legal_orders_that_keep_to_them(work):
    found = greedy_orders(work)
    assert 1 <= len(found) <= 2
    for orders in found:
        check(schedule_of_work("greedy", work, orders, 1))
        assert all(peak <= limit for peak, limit in zip(peaks(work.costs, orders), work.limits, strict=True))


@pytest.mark.parametrize("p", range(1, 10))
def test_every_limit_from_one_microbatch_up_works_for_any_number_of_them(p):
    for m in (1, 2, p, 2 * p + 1):
        for limit in (2, 3, p + 2, 2 * p, 4 * p):
            work = equal(p, m, max(2, limit))
            for orders in greedy_orders(work):
                check(schedule_of_work("greedy", work, orders, 1))
                assert max(peaks(work.costs, orders)) <= work.limits[0]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8, 12])
def test_no_worker_waits_at_equal_times_in_the_memory_of_1f1b(p):
    for m in (2 * p, 2 * p + 1, 3 * p):
        assert windows(equal(p, m, 2 * p, StageCosts(), 0)) == [6 * m]


def test_the_first_orders_have_the_shortest_window():
    for latency in range(6):
        found = windows(equal(4, 8, 8, UNEQUAL, latency))
        assert found == sorted(found)


def test_workers_that_have_less_to_do_may_wait_for_those_that_have_more():
    p, m = 4, 16
    costs = [StageCosts(forward=30, input_grad=36, weight_grad=24) if s in (2, 5) else UNEQUAL for s in range(2 * p)]
    busiest = 2 * m * 90
    assert min(windows(work_of(p, m, costs, 1, [2 * p - 2] * p))) <= 1.02 * busiest


def test_a_worker_that_cannot_hold_one_microbatch_is_named():
    with pytest.raises(ConfigError, match=r"worker 0 may hold 1 .* one micro-batch holds 2"):
        equal(3, 4, 1)

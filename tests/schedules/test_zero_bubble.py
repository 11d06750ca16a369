import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.split_times import SOME_MICROBATCHES, peak_memory, simulated, window
from kit.strategies import durations
from schedules.measures import counts_up_to_64

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.zb_h1 import zb_h1
from diffusionpipe.schedules.families.zb_h2 import zb_h2
from diffusionpipe.schedules.families.zero_bubble import zb_1p, zb_2p, zero_bubble
from diffusionpipe.timing.legal import check

# Published: workers, micro-batches, (F, I, W, latency), window in the memory of p and of 2p micro-batches.
PUBLISHED = [
    (2, 4, (1, 1, 1, 0), 13, 12),
    (4, 8, (1, 1, 1, 0), 27, 24),
    (4, 8, (10, 10, 10, 1), 282, 246),
    (4, 8, (10, 12, 8, 1), 294, 256),
    (4, 12, (1, 1, 1, 0), 39, 36),
    (8, 16, (1, 1, 1, 0), 55, 48),
    (8, 16, (10, 12, 8, 1), 606, 528),
    (8, 24, (1, 1, 1, 0), 79, 72),
    (8, 32, (10, 10, 10, 1), 1058, 968),
]

stage_costs = st.builds(
    StageCosts,
    forward=durations,
    input_grad=durations,
    weight_grad=durations,
    activation=st.integers(1, 5),
    kept_after_input_grad=st.just(1),
)


@pytest.mark.parametrize("kept", [1, 2], ids=["half is freed by I", "all is freed by W"])
@pytest.mark.parametrize(("p", "m", "times", "window_1p", "window_2p"), PUBLISHED)
def test_no_worker_runs_longer_than_in_the_published_schedules(p, m, times, window_1p, window_2p, kept):
    forward, input_grad, weight_grad, latency = times
    costs = StageCosts(
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, activation=2, kept_after_input_grad=kept
    )
    for family, published, limit in ((zb_1p, window_1p, 2 * p), (zb_2p, window_2p, 4 * p)):
        timeline = simulated(family(p, m, costs=costs, latency=latency), costs, latency)
        assert window(timeline) <= published
        assert peak_memory(timeline) <= limit


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(zb_1p(p, m, 2))
        check(zb_2p(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(zb_1p(p, m))
        check(zb_2p(p, m))


@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 4))
def test_any_costs_and_limits_give_a_legal_schedule_that_keeps_to_them(data, p, m, latency):
    costs = data.draw(st.lists(stage_costs, min_size=p, max_size=p))
    limits = [cost.activation * data.draw(st.integers(1, 2 * p)) for cost in costs]
    schedule = zero_bubble(p, m, limits=limits, costs=costs, latency=latency)
    check(schedule)
    timeline = simulated(schedule, costs, latency)
    assert all(timeline.peak_memory(worker) <= limit for worker, limit in enumerate(limits))


@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 4))
def test_is_never_longer_than_the_schedules_made_by_hand(data, p, m, latency):
    costs = data.draw(st.lists(stage_costs, min_size=p, max_size=p))
    for family, by_hand in ((zb_1p, zb_h1), (zb_2p, zb_h2)):
        found = simulated(family(p, m, costs=costs, latency=latency), costs, latency).makespan
        assert found <= simulated(by_hand(p, m), costs, latency).makespan


def test_memory_below_p_microbatches_costs_time_but_works():
    p, m = 8, 24
    found = [simulated(zero_bubble(p, m, limits=[limit] * p)).makespan for limit in (1, 2, 4, 6, 8)]
    assert found == sorted(found, reverse=True)
    assert found[0] == m * (2 * p + 1)  # one at a time: down, up, and the W of the first stage
    assert found[2] <= 123
    assert found[-1] == 3 * m + p - 1


def test_uneven_stages_are_scheduled_by_their_own_costs():
    times = [(1, 2, 5), (2, 2, 2), (5, 4, 1), (1, 3, 5)]
    costs = [StageCosts(forward=F, input_grad=dx, weight_grad=dw) for F, dx, dw in times]
    known = simulated(zb_2p(4, 8, costs=costs), costs).makespan
    assumed = simulated(zb_2p(4, 8), costs).makespan
    assert known <= 87 < assumed


def test_costs_may_be_fractions_of_seconds_and_zero():
    costs = StageCosts(forward=0.0103, input_grad=0.0127, weight_grad=0)
    check(zb_2p(3, 7, costs=costs, latency=1e-5))
    check(zb_1p(3, 7, costs=StageCosts(forward=0, input_grad=0, weight_grad=0)))
    check(zb_1p(3, 7, costs=StageCosts(activation=0, kept_after_input_grad=0)))


def test_a_worker_that_cannot_hold_one_microbatch_is_named():
    with pytest.raises(ConfigError, match=r"worker 2 may hold 4 .* one micro-batch holds 5"):
        zero_bubble(3, 4, limits=[5, 5, 4], costs=StageCosts(activation=5))


def test_a_wrong_number_of_costs_or_limits_is_refused():
    with pytest.raises(ConfigError, match="2 costs for 3 stages"):
        zb_1p(3, 4, costs=[StageCosts()] * 2)
    with pytest.raises(ConfigError, match="2 limits for 3 workers"):
        zero_bubble(3, 4, limits=[4, 4])


@pytest.mark.parametrize("family", [zb_1p, zb_2p])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(family, sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        family(*sizes)

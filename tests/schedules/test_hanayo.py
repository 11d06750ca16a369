import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.families.hanayo import hanayo
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check


def shortest(p, m, waves):
    """All work of a worker, and the start and the end, where the other workers work."""
    return 3 * (2 * waves * m + p - 1)


@given(st.integers(1, 9), st.integers(1, 16), st.integers(1, 3))
def test_every_size_is_legal(p, m, waves):
    check(hanayo(p, m, 2, waves=waves))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal_and_have_their_time(p):
    for m in counts_up_to_64(p):
        for waves in (1, 2) if m % 8 == 1 else (1,):
            schedule = hanayo(p, m, waves=waves)
            check(schedule)
            if m >= 2 * p:
                assert makespan(schedule) == shortest(p, m, waves)


@given(st.integers(1, 12), st.integers(1, 30))
def test_one_wave_has_its_time_for_any_number_of_microbatches(p, m):
    assert makespan(hanayo(p, m)) == shortest(p, m, 1) + max(0, 3 * (p - 1) - 2 * (m - 1))


@given(st.integers(1, 5), st.integers(0, 8), st.integers(2, 4))
def test_more_waves_make_the_bubble_smaller(p, more, waves):
    m = 2 * p + more
    assert makespan(hanayo(p, m, waves=waves)) == shortest(p, m, waves)


@pytest.mark.parametrize(("depth", "time"), [(4, 16), (6, 26), (8, 36)])
def test_one_wave_has_the_golden_times_of_chimera_with_twice_the_workers(depth, time):
    assert makespan(hanayo(depth // 2, depth // 2)) == time


@given(st.integers(1, 10), st.integers(1, 24), st.integers(1, 2))
def test_a_worker_holds_about_one_and_a_half_times_the_workers(p, m, waves):
    held = max(activations_in_flight(hanayo(p, m, waves=waves))) / (2 * waves)
    assert held <= min(m, 1.5 * p + waves - 1)


@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 8))
def test_no_worker_holds_more_than_the_microbatches_in_flight(p, m, bound):
    schedule = hanayo(p, m, max_in_flight=bound)
    check(schedule)
    assert max(activations_in_flight(schedule)) <= 2 * bound


def test_where_a_wave_turns_round_the_worker_is_the_same():
    workers = [stage.worker for stage in hanayo(3, 3, waves=2).placement.stages]
    assert workers == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]


def test_orders_follow_the_times():
    slow = StageTimes(forward=2, backward=3, latency=3)
    times = {"forward": 2, "backward": 3, "latency": 3}
    assert makespan(hanayo(4, 8, times=slow), **times) < makespan(hanayo(4, 8), **times)


@pytest.mark.parametrize("option", ["waves", "max_in_flight"])
def test_options_below_one_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}=0"):
        hanayo(2, 2, **{option: 0})

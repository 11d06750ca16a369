import pytest
from kit.split_times import EQUAL, SOME_MICROBATCHES, UNEQUAL, simulated
from schedules.measures import counts_up_to_64

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.v_half import v_half
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

# Published for m = 3p: workers, bubble, most stages in flight.
PUBLISHED = [(4, 0.0649, 6), (6, 0.0924, 8), (8, 0.1056, 10), (12, 0.1184, 14), (16, 0.1246, 18), (24, 0.1308, 26)]


@pytest.mark.parametrize(("p", "bubble", "in_flight"), PUBLISHED)
def test_bubble_and_memory_are_as_published(p, bubble, in_flight):
    schedule = v_half(p, 3 * p)
    assert round(simulated(schedule).bubble, 4) <= bubble
    assert max(activations_in_flight(schedule)) == in_flight


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(v_half(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(v_half(p, m))


@pytest.mark.parametrize("p", [3, 4, 5, 8, 9, 10])
def test_time_at_equal_times(p):
    for m in (p, p + 1, 3 * p):
        assert simulated(v_half(p, m)).makespan == 6 * m + 3 * p - (4 if p % 2 else 7)


@pytest.mark.parametrize("costs", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("p", [1, 2, 3, 7, 8])
def test_a_worker_holds_half_of_what_it_holds_in_1f1b(p, costs):
    for m in (1, p, 4 * p):
        assert max(activations_in_flight(v_half(p, m, costs=costs, latency=1))) <= p + (1 if p % 2 else 2)


def test_bubble_at_unequal_times_is_no_greater_than_published():
    timeline = simulated(v_half(8, 24, costs=UNEQUAL, latency=1), UNEQUAL, 1)
    assert timeline.bubble <= 0.160


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        v_half(*sizes)

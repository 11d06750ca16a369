from math import ceil

import pytest
from kit.split_times import EQUAL, SOME_MICROBATCHES, UNEQUAL, simulated
from schedules.measures import counts_up_to_64

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.v_min import v_min
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

# Published for m = 3p: workers, bubble, most stages in flight.
PUBLISHED = [(4, 0.1325, 4), (6, 0.1360, 6), (8, 0.1579, 8), (12, 0.1595, 10), (16, 0.1700, 12), (24, 0.1708, 18)]


@pytest.mark.parametrize(("p", "bubble", "in_flight"), PUBLISHED)
def test_bubble_and_memory_are_no_greater_than_published(p, bubble, in_flight):
    schedule = v_min(p, 3 * p)
    assert round(simulated(schedule).bubble, 4) <= bubble
    assert max(activations_in_flight(schedule)) <= in_flight


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(v_min(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(v_min(p, m))


@pytest.mark.parametrize("p", [3, 4, 5, 6, 7, 8, 9])
def test_time_at_equal_times(p):
    for m in (p, p + 1, 3 * p):
        assert simulated(v_min(p, m)).makespan <= 6 * m + 4 * p - 5


@pytest.mark.parametrize("costs", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_a_worker_holds_about_a_third_of_what_it_holds_in_1f1b(p, costs):
    for m in (1, p, 4 * p):
        in_flight = max(activations_in_flight(v_min(p, m, costs=costs, latency=1)))
        assert in_flight <= 2 * ceil((p - 1) / 3) + 2


def test_bubble_at_unequal_times_is_smaller_than_published():
    timeline = simulated(v_min(8, 24, costs=UNEQUAL, latency=1), UNEQUAL, 1)
    assert timeline.bubble < 0.30  # published .331


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        v_min(*sizes)

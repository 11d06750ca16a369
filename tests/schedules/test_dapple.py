import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.families.dapple import dapple_a, dapple_b
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 16)
bounds = st.none() | st.integers(1, 20)
both = pytest.mark.parametrize("family", [dapple_a, dapple_b])


@both
@given(sizes, st.integers(1, 64), bounds)
def test_every_size_and_bound_is_legal(family, num_workers, num_microbatches, bound):
    check(family(num_workers, num_microbatches, 2, max_in_flight=bound))


@both
@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p, family):
    for m in counts_up_to_64(p):
        schedules = [family(p, m, max_in_flight=bound) for bound in (None, 2, p)]
        for schedule in {one.orders: one for one in schedules}.values():  # policy A's are the same without and with p
            check(schedule)


@given(sizes, sizes)
def test_policy_a_without_a_bound_is_1f1b(num_workers, num_microbatches):
    assert dapple_a(num_workers, num_microbatches).orders == one_f_one_b(num_workers, num_microbatches).orders


@given(sizes, sizes, bounds)
def test_a_worker_holds_what_the_policy_says(p, m, bound):
    most = min(m, bound or m)
    assert activations_in_flight(dapple_a(p, m, max_in_flight=bound)) == tuple(min(p - s, most) for s in range(p))
    held = activations_in_flight(dapple_b(p, m, max_in_flight=bound))
    assert held == tuple(min(2 * (p - s) - 1, most) for s in range(p))


@given(sizes, sizes)
def test_both_policies_take_the_time_of_1f1b_where_communication_is_free(p, m):
    assert makespan(dapple_a(p, m)) == makespan(dapple_b(p, m)) == 3 * (m + p - 1)


@given(sizes, sizes, st.integers(0, 4))
def test_policy_b_pays_for_transfers_only_at_both_ends(p, m, latency):
    times = {"forward": 4, "backward": 8, "latency": latency}
    assert makespan(dapple_b(p, m), **times) == 12 * (m + p - 1) + 2 * (p - 1) * latency


def test_policy_a_waits_for_transfers_where_policy_b_does_not():
    assert makespan(dapple_a(4, 16), latency=1) > makespan(dapple_b(4, 16), latency=1)


@given(sizes, sizes)
def test_nothing_overlaps_with_one_microbatch_in_flight(p, m):
    assert makespan(dapple_a(p, m, max_in_flight=1)) == makespan(dapple_b(p, m, max_in_flight=1)) == 3 * m * p


@pytest.mark.parametrize("p", [2, 4, 6])
def test_less_memory_never_saves_time(p):
    times = [makespan(dapple_a(p, 24, max_in_flight=bound)) for bound in range(1, p + 1)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 3 * (24 + p - 1)


@both
def test_a_bound_below_one_is_refused(family):
    with pytest.raises(ConfigError, match="max_in_flight=0"):
        family(2, 2, max_in_flight=0)

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules import gpipe, one_f_one_b
from diffusionpipe.schedules.families.kfkb import kfkb
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 16)
groups = st.integers(1, 6)


@given(sizes, st.integers(1, 64), groups)
def test_every_size_and_group_is_legal(p, m, k):
    check(kfkb(p, m, 2, group_size=k))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        for k in (2, 3):
            check(kfkb(p, m, group_size=k))


@given(sizes, sizes)
def test_groups_of_one_are_1f1b_and_one_group_is_gpipe(p, m):
    assert kfkb(p, m, group_size=1).orders == one_f_one_b(p, m).orders
    assert kfkb(p, m, group_size=m).orders == gpipe(p, m).orders


@given(sizes, sizes, groups)
def test_time_is_that_of_1f1b_and_memory_grows_with_the_group(p, m, k):
    schedule = kfkb(p, m, group_size=k)
    assert makespan(schedule) == 3 * (m + p - 1)
    assert activations_in_flight(schedule) == tuple(min(k * (p - s), m) for s in range(p))


@given(sizes, sizes, st.integers(2, 5), st.data())
def test_a_group_hides_transfers_shorter_than_the_rest_of_it(p, m, k, data):
    latency = data.draw(st.integers(0, k - 1))
    times = {"forward": 1, "backward": 1, "latency": latency}
    assert makespan(kfkb(p, m, group_size=k), **times) == 2 * (m + p - 1) + 2 * (p - 1) * latency


def test_with_slow_links_groups_beat_1f1b():
    assert makespan(kfkb(4, 16, group_size=3), latency=2) < makespan(one_f_one_b(4, 16), latency=2)


def test_groups_below_one_are_refused():
    with pytest.raises(ConfigError, match="group_size=0"):
        kfkb(2, 2, group_size=0)

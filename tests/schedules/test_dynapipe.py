import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan, samples_held

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.dapple import dapple_b
from diffusionpipe.schedules.families.dynapipe import dynapipe
from diffusionpipe.timing.legal import check

workers = st.integers(1, 16)
unequal = st.lists(st.integers(1, 9), min_size=1, max_size=32)


@given(workers, unequal, st.none() | st.integers(0, 20))
def test_every_size_and_limit_is_legal_and_the_limit_holds(p, sizes, spare):
    limit = None if spare is None else max(sizes) + spare
    schedule = dynapipe(p, len(sizes), microbatch_sizes=sizes, max_samples=limit)
    check(schedule)
    assert schedule.placement.pipelines[0].microbatches == tuple(sizes)
    if limit is not None:
        assert max(samples_held(schedule)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        sizes = [1 + i % 4 for i in range(m)]
        for limit in (None, 4, 2 * p + 3):
            check(dynapipe(p, m, microbatch_sizes=sizes, max_samples=limit))


@given(workers, st.integers(1, 64), st.integers(1, 3))
def test_equal_sizes_without_a_limit_are_dapples_policy_b(p, m, size):
    assert dynapipe(p, m, size).orders == dapple_b(p, m, size).orders


@given(workers, st.integers(1, 24))
def test_room_for_one_microbatch_leaves_no_overlap(p, m):
    assert makespan(dynapipe(p, m, 2, max_samples=2)) == 3 * m * p


def test_the_limit_counts_samples_not_microbatches():
    schedule = dynapipe(4, 8, microbatch_sizes=(4, 1, 1, 1, 1, 4, 1, 1), max_samples=4)
    first = [str(action) for action in schedule.orders[0]]
    assert first[:2] == ["0F0", "0B0"]
    assert samples_held(schedule)[0] == 4
    assert first[2:6] == ["0F1", "0F2", "0F3", "0F4"]


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (5, 11)])
def test_more_memory_costs_no_time_where_sizes_are_equal(p, m):
    times = [makespan(dynapipe(p, m, max_samples=limit)) for limit in range(1, 2 * p + 1)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 3 * (m + p - 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch_sizes": (1, 2)}, "3 micro-batches have 2 sizes"),
        ({"microbatch_sizes": (1, 0, 2)}, "microbatch_size=0"),
        ({"microbatch_sizes": (1, 5, 2), "max_samples": 4}, "use max_samples of 5 or more"),
        ({"max_samples": 0}, "use max_samples of 2 or more"),
    ],
)
def test_options_that_cannot_work_are_refused_with_what_works(options, said):
    size = 1 if "microbatch_sizes" in options else 2
    with pytest.raises(ConfigError, match=said):
        dynapipe(2, 3, size, **options)


def test_a_size_beside_sizes_is_refused():
    with pytest.raises(ConfigError, match="microbatch_size=2 has no effect"):
        dynapipe(2, 3, 2, microbatch_sizes=(1, 1, 1))

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules import gpipe
from diffusionpipe.schedules.families.looped_bfs import looped_bfs
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 12)
chunk_counts = st.integers(1, 4)


@given(sizes, sizes, chunk_counts)
def test_every_size_is_legal(p, m, v):
    check(looped_bfs(p, m, 2, chunks=v))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        for v in (1, 2, 3) if m % 8 == 1 else (2,):
            check(looped_bfs(p, m, chunks=v))


@given(sizes, sizes)
def test_one_chunk_is_gpipe(p, m):
    assert looped_bfs(p, m, chunks=1).orders == gpipe(p, m).orders


@given(sizes, st.integers(1, 24), chunk_counts)
def test_time_is_that_of_interleaved_1f1b_and_everything_is_held(p, m, v):
    schedule = looped_bfs(p, m, chunks=v)
    assert makespan(schedule) == 3 * (v * m + p - 1 + (v - 1) * max(0, p - m))
    assert set(activations_in_flight(schedule)) == {v * m}


def test_the_golden_bubble_of_8_workers_and_16_microbatches():
    assert round(100 * (1 - 96 / makespan(looped_bfs(8, 16))), 1) == 17.9


def test_a_worker_goes_to_its_next_chunk_once_in_each_direction():
    for order in looped_bfs(4, 8, chunks=3).orders:
        changes = sum(a.stage != b.stage for a, b in pairwise(order))
        assert changes == 4


def test_chunks_below_one_are_refused():
    with pytest.raises(ConfigError, match="chunks=0"):
        looped_bfs(2, 2, chunks=0)

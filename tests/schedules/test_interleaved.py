import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.torch_csv import schedule_from_csv
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.building.alternation import rounds
from diffusionpipe.schedules.families.interleaved import interleaved
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 12)
chunk_counts = st.integers(1, 4)

# What torch.distributed.pipelining's ScheduleInterleaved1F1B has for 2 ranks, 4 micro-batches, 2 stages on each.
TORCH = """\
0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
"""


def test_orders_are_those_of_torch():
    assert interleaved(2, 4).orders == schedule_from_csv(TORCH).orders


@given(sizes, sizes, chunk_counts)
def test_every_size_is_legal(p, m, v):
    check(interleaved(p, m, 2, chunks=v))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        for v in (1, 2, 3) if m % 8 == 1 else (2,):
            check(interleaved(p, m, chunks=v))


@given(sizes, sizes)
def test_one_chunk_is_1f1b(p, m):
    assert makespan(interleaved(p, m, chunks=1)) == makespan(one_f_one_b(p, m))


@given(sizes, st.integers(1, 24), chunk_counts)
def test_the_bubble_is_a_vth_of_that_of_1f1b_for_any_number_of_microbatches(p, m, v):
    schedule = interleaved(p, m, chunks=v)
    assert makespan(schedule) == 3 * (v * m + p - 1 + (v - 1) * max(0, p - m))
    if m >= p:
        assert makespan(schedule, forward=2, backward=3) == 5 * (v * m + p - 1)


@given(sizes, st.integers(1, 24), chunk_counts)
def test_activations_follow_from_the_warm_up(p, m, v):
    longest = len(rounds(m, p)[0])
    expected = tuple(min(v * m, (v - 1) * longest + 2 * (p - s) - 1) for s in range(p))
    assert activations_in_flight(interleaved(p, m, chunks=v)) == expected


@pytest.mark.parametrize(("v", "bubble"), [(2, 17.9), (4, 9.9)])
def test_the_golden_bubble_of_8_workers_and_16_microbatches(v, bubble):
    schedule = interleaved(8, 16, chunks=v)
    assert round(100 * (1 - 48 * v / makespan(schedule)), 1) == bubble
    assert max(activations_in_flight(schedule)) / v == 8 + 7 / v


def test_chunks_below_one_are_refused():
    with pytest.raises(ConfigError, match="chunks=0"):
        interleaved(2, 2, chunks=0)

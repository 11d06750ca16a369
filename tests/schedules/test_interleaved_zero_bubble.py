import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.torch_csv import schedule_from_csv
from diffusionpipe.schedules.building.alternation import rounds
from diffusionpipe.schedules.families.interleaved_zero_bubble import interleaved_zero_bubble
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 12)
chunk_counts = st.integers(1, 4)

# What torch.distributed.pipelining's ScheduleInterleavedZeroBubble has for 2 ranks, 4 micro-batches, 2 stages on each.
TORCH = """\
0F0,0F1,2F0,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,2F2,0I1,0W1,2F3,2I2,2W2,2I3,2W3,0I2,0W2,0I3,0W3
1F0,1F1,3F0,3I0,3F1,3I1,3W0,1F2,1I0,3W1,1F3,1I1,1W0,3F2,3I2,1W1,3F3,3I3,3W2,1I2,3W3,1I3,1W2,1W3
"""


def test_orders_are_those_of_torch():
    assert interleaved_zero_bubble(2, 4).orders == schedule_from_csv(TORCH).orders


@given(sizes, sizes, chunk_counts)
def test_every_size_is_legal(p, m, v):
    check(interleaved_zero_bubble(p, m, 2, chunks=v))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        for v in (1, 2, 3) if m % 8 == 1 else (2,):
            check(interleaved_zero_bubble(p, m, chunks=v))


@given(sizes, st.integers(0, 24), chunk_counts)
def test_the_bubble_is_that_of_zb_h1_divided_by_the_chunks(p, more, v):
    schedule = interleaved_zero_bubble(p, p + more, chunks=v)
    assert makespan(schedule) == 3 * v * (p + more) + (p - 1)


@given(sizes, st.integers(1, 24), chunk_counts)
def test_every_worker_holds_as_many_activations(p, m, v):
    longest = len(rounds(m, p)[0])
    assert set(activations_in_flight(interleaved_zero_bubble(p, m, chunks=v))) == {min(v * m, (v - 1) * longest + p)}


@pytest.mark.parametrize(("p", "m", "time"), [(2, 4, 13), (4, 8, 27), (4, 12, 39), (8, 16, 55), (8, 24, 79)])
def test_one_chunk_has_the_golden_times_of_zb_h1(p, m, time):
    schedule = interleaved_zero_bubble(p, m, chunks=1)
    assert makespan(schedule) == time
    assert max(activations_in_flight(schedule)) == p


def test_the_golden_bubble_of_8_workers_and_16_microbatches():
    schedule = interleaved_zero_bubble(8, 16)
    assert round(100 * (1 - 96 / makespan(schedule)), 1) == 6.8
    assert max(activations_in_flight(schedule)) == 2 * 8


def test_chunks_below_one_are_refused():
    with pytest.raises(ConfigError, match="chunks=0"):
        interleaved_zero_bubble(2, 2, chunks=0)

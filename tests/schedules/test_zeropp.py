import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import counts_up_to_64, makespan, window

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.schedules.building.alternation import rounds
from diffusionpipe.schedules.families.zeropp import zeropp
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 16)
chunk_counts = st.integers(1, 4)
units = st.none() | st.integers(1, 20)


@given(st.integers(1, 10), st.integers(1, 24), st.integers(1, 3), units)
def test_every_size_is_legal(p, m, v, unit):
    check(zeropp(p, m, 2, chunks=v, unit=unit))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        for v in (1, 2, 3) if m % 8 == 1 else (2,):
            check(zeropp(p, m, chunks=v))


@given(st.integers(1, 6), st.integers(0, 20), chunk_counts)
def test_long_units_leave_the_start_as_the_only_bubble(p, more, v):
    m = 2 * p - 1 + more
    schedule = zeropp(p, m, chunks=v)
    assert makespan(schedule) == 3 * v * m + p - 1
    assert window(schedule) == 3 * v * m


@given(st.integers(1, 8), st.integers(0, 7), st.integers(1, 4), chunk_counts)
def test_a_short_unit_costs_what_it_lacks_at_every_border(p, more, num_units, v):
    length = p + more
    schedule = zeropp(p, num_units * length, chunks=v, unit=length)
    borders = (num_units - 1) * max(0, 2 * p - 1 - length)
    assert makespan(schedule) == 3 * v * num_units * length + p - 1 + borders


@given(sizes, st.integers(1, 40), chunk_counts, units)
def test_every_worker_holds_one_unit(p, m, v, unit):
    longest = len(rounds(m, unit or 2 * p - 1)[0])
    assert set(activations_in_flight(zeropp(p, m, chunks=v, unit=unit))) == {v * longest}


@pytest.mark.parametrize(("v", "bubble"), [(2, 6.8), (4, 3.5)])
def test_the_golden_bubble_of_8_workers_and_16_microbatches(v, bubble):
    assert round(100 * (1 - 48 * v / makespan(zeropp(8, 16, chunks=v))), 1) == bubble


@given(st.integers(1, 6), st.integers(1, 12), chunk_counts)
def test_a_worker_stays_with_a_chunk_for_a_whole_unit_in_each_direction(p, m, v):
    for worker, order in enumerate(zeropp(p, m, chunks=v, unit=m).orders):
        for op, stages in ((Op.F, range(worker, v * p, p)), (Op.I, range(worker, v * p, p)[::-1])):
            assert [a.stage for a in order if a.op is op] == [stage for stage in stages for _ in range(m)]


@pytest.mark.parametrize("option", ["chunks", "unit"])
def test_options_below_one_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}=0"):
        zeropp(2, 2, **{option: 0})

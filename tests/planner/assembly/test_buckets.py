import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import chains

from diffusionpipe.errors import ScheduleError
from diffusionpipe.passes import reduce_gradients
from diffusionpipe.planner.assembly.buckets import bucket_starts, subdivide
from diffusionpipe.schedules import gpipe, one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check


@given(chains, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_a_subdivided_schedule_is_legal_and_takes_as_long(family, stages, microbatches, parts):
    whole = family(stages, microbatches)
    cut = subdivide(whole, parts)
    check(cut)
    time = simulate(whole, uniform_costs(whole, forward=parts, backward=2 * parts)).makespan
    assert simulate(cut, uniform_costs(cut)).makespan == time


def test_the_gradients_of_the_last_layers_are_reduced_while_the_first_ones_are_computed():
    cut = reduce_gradients(subdivide(one_f_one_b(1, 2), 2), is_data_parallel=True)
    assert " ".join(map(str, cut.orders[0])) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD"
    assert simulate(cut, uniform_costs(cut, reduce=2)).makespan == 12 + 2
    whole = reduce_gradients(one_f_one_b(1, 2), is_data_parallel=True)
    assert simulate(whole, uniform_costs(whole, forward=2, backward=4, reduce=4)).makespan == 12 + 4


def test_one_part_changes_nothing():
    assert subdivide(gpipe(3, 2), 1) == gpipe(3, 2)


def test_reductions_must_come_later():
    with pytest.raises(ScheduleError, match="before all other passes"):
        subdivide(reduce_gradients(gpipe(2, 2), is_data_parallel=True), 2)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_every_bucket_has_a_layer(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    starts = bucket_starts(weights, parts)
    assert len(starts) == parts
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    assert starts[-1] < len(weights)


def test_equal_layers_are_cut_equally():
    assert bucket_starts([3] * 8, 4) == (0, 2, 4, 6)

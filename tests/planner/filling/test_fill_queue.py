import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.ir import Range
from diffusionpipe.planner.filling.fill_queue import FillQueue, placed
from diffusionpipe.planner.filling.fills import FillOptions, FrozenLayers

FROZEN = FrozenLayers(components=("a", "a", "b"), forward=lambda layer, samples: (1, 2, 6)[layer] * samples)


def queue(samples, chunk, **options):
    return FillQueue(FROZEN, FillOptions(**options), worker=0, samples=samples, chunk=chunk)


def test_a_wait_takes_whole_layers_and_then_a_part_of_the_samples_of_the_next():
    one = queue(4, 4)
    assert one.fill(0, 25) == 24
    assert one.pieces == [(0, 0, 2, 0, 4), (0, 2, 3, 0, 2)]
    assert one.fill(3, 100) == 12
    assert one.pieces[2:] == [(3, 2, 3, 2, 4)]
    assert one.is_empty


def test_a_younger_chunk_uses_what_the_oldest_leaves():
    one = queue(2, 1)
    assert one.fill(0, 5) == 4  # layers 0 and 1 of sample 0, layer 0 of sample 1
    assert one.pieces == [(0, 0, 2, 0, 1), (0, 0, 1, 1, 2)]


def test_unfinished_chunks_stay_within_the_limit():
    one = queue(3, 1, open_chunks=1)
    assert one.fill(0, 5) == 3
    assert one.pieces == [(0, 0, 2, 0, 1)]


def test_a_piece_may_exceed_its_wait_only_up_to_the_limit():
    one = queue(2, 2)
    one.fill(0, 6)
    assert one.exceed(0, 1, 5) == 0
    assert one.exceed(0, 1, 6) == 6
    assert one.pieces[-1] == (0, 2, 3, 0, 1)


def test_faster_devices_take_less_time():
    one = FillQueue(FROZEN, FillOptions(speeds=(2.0,)), worker=0, samples=2, chunk=2)
    assert one.drain(0) == 9
    assert one.used == 9


@given(
    st.integers(1, 12), st.integers(1, 5), st.floats(0, 2), st.lists(st.floats(0, 30), max_size=20), st.integers(1, 3)
)
def test_pieces_cover_every_layer_of_every_sample_once_in_order_and_take_what_is_said(
    samples, chunk, overhead, waits, open_chunks
):
    options = FillOptions(overhead=overhead, open_chunks=open_chunks)
    one = FillQueue(FROZEN, options, worker=0, samples=samples, chunk=chunk)
    for position, wait in enumerate(waits):
        assert one.fill(position, wait) <= wait * (1 + 1e-12)
    one.drain(len(waits))
    reached = [0] * samples
    for _, layer, stop, first, last in one.pieces:
        for sample in range(first, last):
            assert reached[sample] == layer
            reached[sample] = stop
    assert reached == [3] * samples
    fills = placed(one.pieces, FROZEN, options, worker=0, first=7)
    assert sum(seconds for _, seconds in fills) == pytest.approx(one.used)
    assert all(fill.samples.intersection(Range(7, 7 + samples)) == fill.samples for fill, _ in fills)

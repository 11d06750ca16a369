from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.schedules.building.alternation import alternate, depth_first, rounds
from diffusionpipe.schedules.building.shapes import backwards, forwards

counts = st.integers(1, 60)


@given(counts, counts)
def test_rounds_hold_every_microbatch_once_in_order(num_microbatches, shortest):
    assert [i for one in rounds(num_microbatches, shortest) for i in one] == list(range(num_microbatches))


@given(counts, counts)
def test_rounds_are_as_many_as_the_shortest_length_allows_and_nearly_equal(num_microbatches, shortest):
    lengths = [len(one) for one in rounds(num_microbatches, shortest)]
    assert len(lengths) == max(1, num_microbatches // shortest)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(counts, st.integers(1, 4))
def test_a_round_goes_through_all_chunks_before_the_next(num_microbatches, chunks):
    in_rounds = rounds(num_microbatches, 4)
    sequence = depth_first(in_rounds, chunks)
    assert len(set(sequence)) == len(sequence) == chunks * num_microbatches
    for one in in_rounds:
        start = one.start * chunks
        assert {i for _, i in sequence[start : start + chunks * len(one)]} == set(one)


@given(st.integers(0, 9))
def test_alternation_goes_from_1f1b_to_all_forwards_first(warm_up):
    ahead, back = forwards(0, 0, 9), backwards(0, 0, 9)
    order = alternate([[a] for a in ahead], [[a] for a in back], warm_up=warm_up)
    assert order[:warm_up] == ahead[:warm_up]
    assert [a for a in order if a in ahead] == ahead
    assert [a for a in order if a in back] == back
    assert len(order) == 18
    assert order.index(back[0]) == min(warm_up + 1, 9)

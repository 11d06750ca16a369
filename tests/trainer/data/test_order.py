"""The order of growing data, against a list that is written down epoch by epoch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.trainer.data.batches.batch import sample_indices
from diffusionpipe.trainer.data.order import growth_of, next_epoch, num_epochs, place_of
from diffusionpipe.trainer.data.randomness import permutation

growths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), max_size=4)


def written_down(first, growth, length):
    """(epoch, number in it, size) of each position: an epoch has the samples that are known when it begins."""
    places, epoch = [], 0
    while len(places) < length:
        start = len(places)
        size = first + sum(count for since, count in growth if since <= start)
        places += [(epoch, number, size) for number in range(size)]
        epoch += 1
    return places[:length]


@given(st.integers(1, 12), growths)
def test_every_position_is_where_the_list_has_it(first, counts):
    growth, places = growth_of(counts), written_down(first, counts, 120)
    total = first + sum(count for _, count in growth)
    assert [tuple(place_of(position, total, growth)) for position in range(120)] == places
    starts = [position for position, (_, number, _) in enumerate(places) if number == 0]
    for position in range(starts[-1]):
        assert next_epoch(position, total, growth) == next(start for start in starts if start >= position)
        epoch, number, size = places[position]
        assert num_epochs(position, total, growth) == epoch + number / size


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 3), st.integers(1, 4), st.integers(0, 6))
def test_new_samples_change_nothing_before_the_next_epoch_and_come_once_in_each_epoch_from_then(
    size, batch, seed, count, step
):
    start = next_epoch(step * batch, size)
    growth, length = growth_of([(start, count)]), 80 + start
    total = size + (count if start else 0)  # what is known at the beginning is no growth

    def order(num_samples, growth):
        steps = range(-(-length // batch))
        of_step = {"seed": seed, "batch": batch, "positions": range(batch), "growth": growth}
        return [index for k in steps for index in sample_indices(num_samples, step=k, **of_step)][:length]

    before, after = order(size, ()), order(total, growth)
    assert after[:start] == before[:start]
    epoch = start // size
    for first in range(start, length - total, total):
        assert after[first : first + total] == permutation(seed=seed, epoch=epoch, size=total).tolist()
        epoch += 1


def test_a_growth_from_the_beginning_is_none():
    assert growth_of([(0, 20), (30, 2), (30, 3), (10, 1)]) == ((10, 1), (30, 5))
    assert growth_of([(0, 3)]) == ()

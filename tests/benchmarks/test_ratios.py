import pytest

from benchmarks.throughput.ratios import interleaved, median_ratio


def test_equal_ratios_have_an_interval_of_one_point():
    ratio = median_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)


def test_the_ratio_is_formed_within_rounds_so_that_a_slow_round_does_not_count():
    ratio = median_ratio([1.0, 100.0, 1.0], [2.0, 200.0, 2.0])
    assert ratio.median == 0.5


def test_the_interval_holds_the_median_and_stays_within_what_was_measured():
    ratio = median_ratio([1.0, 1.1, 0.9, 1.3, 0.8, 1.0, 1.2], [1.0] * 7)
    assert 0.8 <= ratio.low <= ratio.median <= ratio.high <= 1.3
    assert ratio.low < ratio.high


def test_the_same_measurements_give_the_same_interval():
    times = [1.0, 1.1, 0.9, 1.3, 0.8]
    assert median_ratio(times, [1.0] * 5) == median_ratio(times, [1.0] * 5)


@pytest.mark.parametrize("num_rounds", [1, 3, 7])
def test_every_round_has_every_name_once_and_no_name_keeps_its_place(num_rounds):
    names = ["a", "b", "c"]
    rounds = interleaved(names, num_rounds)
    assert [sorted(order) for order in rounds] == [names] * num_rounds
    assert len({order[0] for order in rounds}) == min(num_rounds, len(names))

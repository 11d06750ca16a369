from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.errors import ConfigError
from diffusionpipe.profiler.links import (
    MESSAGE_SIZES,
    Trial,
    _fit_overhead,
    _nodes,
    fit_line,
    pair_links,
)
from diffusionpipe.profiler.pairs import MOST_RANKS, rounds_across, rounds_inside


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_a_line_is_found_again(latency, bandwidth):
    found = fit_line([(size, latency + size / bandwidth) for size in MESSAGE_SIZES])
    assert found == pytest.approx((latency, bandwidth), rel=1e-3, abs=1e-9)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(MESSAGE_SIZES), max_size=len(MESSAGE_SIZES)))
def test_noise_never_makes_a_latency_negative_or_a_bandwidth_nonsense(seconds):
    latency, bandwidth = fit_line(list(zip(MESSAGE_SIZES, seconds, strict=True)))
    assert 0 <= latency <= min(seconds)
    assert 0 < bandwidth < float("inf")


def test_a_large_message_that_was_late_leaves_the_latency_of_small_ones():
    latency, _ = fit_line([(1, 2.0), (2, 3.0), (1000, 1300.0), (2000, 2000.0)])
    assert latency == pytest.approx(1.0, rel=0.15)


def test_ranks_are_numbered_by_machine():
    assert _nodes(["a", "a", "b", "b", "b"]) == (0, 0, 1, 1, 1)
    with pytest.raises(ConfigError, match="follow each other"):
        _nodes(["a", "b", "a"])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_pair_is_measured_once_in_rounds_of_disjoint_pairs(sizes):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    inside, across = rounds_inside(nodes), rounds_across(nodes)
    for rounds in (*inside, *across):
        members = [rank for pair in rounds for rank in pair]
        assert members
        assert len(members) == len(set(members))
    measured = [pair for one in (*inside, *across) for pair in one]
    assert sorted(measured) == list(combinations(range(len(nodes)), 2))
    assert all(nodes[a] == nodes[b] for one in inside for a, b in one)
    assert all(nodes[a] < nodes[b] for one in across for a, b in one)


@pytest.mark.parametrize(("num_nodes", "size"), [(1, 8), (2, 8), (4, 2)])
def test_equal_nodes_take_one_round_less_than_ranks(num_nodes, size):
    nodes = [node for node in range(num_nodes) for _ in range(size)]
    assert len(rounds_inside(nodes)) + len(rounds_across(nodes)) == num_nodes * size - 1


def test_of_as_many_ranks_as_are_measured_in_pairs_all_pairs_are():
    nodes = [rank // 8 for rank in range(MOST_RANKS)]
    found = [{pair for one in rounds(nodes) for pair in one} for rounds in (rounds_inside, rounds_across)]
    assert sum(map(len, found)) == MOST_RANKS * (MOST_RANKS - 1) // 2


def test_of_a_large_job_all_neighbours_are_measured():
    nodes = [rank // 8 for rank in range(2 * MOST_RANKS)]
    inside = {pair for one in rounds_inside(nodes) for pair in one}
    assert inside == {(rank, rank + 1) for rank in range(len(nodes) - 1) if rank % 8 < 7}
    assert rounds_across(nodes) == [tuple((rank, rank + 8) for rank in range(8))]


def test_each_pair_gets_the_line_through_its_own_times():
    bandwidths = {(0, 1): 2e9, (0, 2): 2e9, (1, 2): 1e8}
    trials = [
        Trial(
            what="message in a node",
            ranks=2,
            num_bytes=size,
            seconds=1.0,
            pairs=tuple((pair, 1e-5 + size / bandwidth) for pair, bandwidth in bandwidths.items()),
        )
        for size in MESSAGE_SIZES
    ]
    found = {(pair.first, pair.second): pair.bandwidth for pair in pair_links(trials)}
    assert found == pytest.approx(bandwidths, rel=1e-3)


def test_what_a_message_takes_from_the_processor_is_fitted_and_nothing_on_a_gpu():
    trials = [
        Trial(what="message in a node", ranks=2, num_bytes=size, seconds=1.0, busy=5e-5 + 2e-10 * size)
        for size in MESSAGE_SIZES
    ]
    assert _fit_overhead(trials, "message in a node") == pytest.approx((5e-5, 2e-10), rel=1e-3)
    assert _fit_overhead(trials, "sum in a node") == (0.0, 0.0)

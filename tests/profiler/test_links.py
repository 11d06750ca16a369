import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.errors import ConfigError
from diffusionpipe.profiler.links import (
    MESSAGE_SIZES,
    Trial,
    _fit_overhead,
    _nodes,
    _pairs_across,
    _pairs_inside,
    fit_line,
)


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_a_line_is_found_again(latency, bandwidth):
    found = fit_line([(size, latency + size / bandwidth) for size in MESSAGE_SIZES])
    assert found == pytest.approx((latency, bandwidth), rel=1e-3, abs=1e-9)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(MESSAGE_SIZES), max_size=len(MESSAGE_SIZES)))
def test_noise_never_makes_a_latency_negative_or_a_bandwidth_nonsense(seconds):
    latency, bandwidth = fit_line(list(zip(MESSAGE_SIZES, seconds, strict=True)))
    assert 0 <= latency <= min(seconds)
    assert 0 < bandwidth < float("inf")


def test_ranks_are_numbered_by_machine():
    assert _nodes(["a", "a", "b", "b", "b"]) == (0, 0, 1, 1, 1)
    with pytest.raises(ConfigError, match="follow each other"):
        _nodes(["a", "b", "a"])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_rank_is_in_one_pair_at_most_and_pairs_lie_where_they_should(sizes):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    inside, across = _pairs_inside(nodes), _pairs_across(nodes)
    for pairs in (inside, across):
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))
    assert all(nodes[a] == nodes[b] for a, b in inside)
    assert all((nodes[a], nodes[b]) == (0, 1) for a, b in across)
    assert len(inside) == sum(size // 2 for size in sizes)


def test_what_a_message_takes_from_the_processor_is_fitted_and_nothing_on_a_gpu():
    trials = [
        Trial(what="message in a node", ranks=2, num_bytes=size, seconds=1.0, busy=5e-5 + 2e-10 * size)
        for size in MESSAGE_SIZES
    ]
    assert _fit_overhead(trials, "message in a node") == pytest.approx((5e-5, 2e-10), rel=1e-3)
    assert _fit_overhead(trials, "sum in a node") == (0.0, 0.0)

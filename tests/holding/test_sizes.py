"""Sizes of samples as tenants of the ledger: maxima of memory, means of time."""

import random
from dataclasses import replace

import pytest
from planner.synthetic import chain

from diffusionpipe.holding.sizes import at_size, profile_of_sizes, smallest_of


def scaled(tokens, *, square=0.0):
    """A chain whose layers take times and bytes in proportion to tokens, and a part to their square."""
    own = chain([1e-3 * (tokens + square * tokens**2) * place for place in (1, 2, 3)], elements=8 * tokens, frozen=1e-3)
    return replace(own, graph=own.graph)


def over(all_tokens, shares, **more):
    profiles = [scaled(tokens, **more) for tokens in all_tokens]
    models = [profile.graph for profile in profiles]
    return profiles, profile_of_sizes(profiles[0], profiles[smallest_of(models)], models, shares)


@pytest.mark.parametrize("square", [0.0, 0.2])
def test_times_are_the_mean_over_the_shares_though_two_sizes_alone_were_measured(square):
    draw = random.Random(0)
    for _ in range(20):
        tokens = sorted((draw.randint(1, 40) for _ in range(4)), reverse=True)
        parts = [draw.random() for _ in tokens]
        shares = [part / sum(parts) for part in parts]
        profiles, joined = over(tokens, shares, square=square)
        for name in ("layer0", "layer2", "encode"):
            for batch in (1, 3, 16):
                expected = sum(share * own.forward(name, batch) for share, own in zip(shares, profiles, strict=True))
                assert joined.forward(name, batch) == pytest.approx(expected, rel=1e-9)


def test_bytes_are_the_largest_of_all_sizes():
    profiles, joined = over((30, 20, 5), (0.1, 0.1, 0.8))
    for ask in ("activation", "workspace", "kept", "drawing"):
        for batch in (1, 5):
            assert getattr(joined, ask)("layer1", batch) == max(getattr(own, ask)("layer1", batch) for own in profiles)
    assert joined.graph == profiles[0].graph


def test_a_size_alone_has_its_own_times_and_the_mean_of_all_is_the_profile_s():
    shares, parts = (0.5, 0.25, 0.25), (1, 2 / 3, 1 / 6)
    profiles, joined = over((30, 20, 5), shares)
    for number, own in enumerate(profiles):
        assert at_size(joined, number).forward("layer2", 8) == pytest.approx(own.forward("layer2", 8), rel=0.01)
    means = [share * at_size(joined, number).forward("layer2", 8) for number, share in enumerate(shares)]
    assert sum(means) == pytest.approx(joined.forward("layer2", 8))
    assert joined.crossing == pytest.approx(sum(share * part for share, part in zip(shares, parts, strict=True)))


def test_one_size_changes_nothing():
    own = scaled(12)
    joined = profile_of_sizes(own, own, [own.graph], [1.0])
    assert replace(joined, sizes=(), layers=own.layers) == own
    for before, after in zip(own.layers, joined.layers, strict=True):
        assert after == replace(before, by_size=(1.0,))

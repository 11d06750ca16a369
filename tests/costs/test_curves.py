"""Costs at any number of samples: they never fall, grow at most in proportion beyond what was measured, and an error in
one measured cost does not grow on the way."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.costs import Profile
from diffusionpipe.costs.curves import ascending_means, ascending_peaks, cost_at

NOISE = 1.02
SLACK = 1 + 1e-12
"""Of rounding."""
TIMES = ("forward", "input_grad", "weight_grad", "forward_only")
BYTES = ("activation", "workspace", "drawing")

sizes = st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True).map(lambda found: tuple(sorted(found)))
seconds = st.floats(1e-9, 1e6)
samples = st.floats(0, 600) | st.integers(0, 600)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Of a few layers, all of the same costs; every column is of its own."""
    chosen = draw(sizes)
    columns = {name: tuple(draw(seconds) for _ in chosen) for name in TIMES}
    columns |= {name: tuple(draw(st.integers(0, 2**50)) for _ in chosen) for name in BYTES}
    known = synthetic.chain([1.0])
    return replace(
        known, batch_sizes=chosen, layers=tuple(replace(layer, kept=(), **columns) for layer in known.layers)
    )


def asked(profile: Profile, column: str, batch: float) -> float:
    return getattr(profile, column)(profile.layers[-1].name, batch)


columns = st.sampled_from((*TIMES, *BYTES))


@given(profiles(), columns, samples, samples)
def test_no_cost_falls_with_samples(profile, column, one, other):
    less, more = sorted((one, other))
    assert asked(profile, column, less) <= asked(profile, column, more)


@given(profiles(), columns, st.floats(1, 100))
def test_beyond_the_largest_size_a_cost_is_at_least_flat_and_at_most_in_proportion(profile, column, factor):
    largest = profile.batch_sizes[-1]
    known, beyond = asked(profile, column, largest), asked(profile, column, largest * factor)
    rounding = 1 if column in BYTES else 0
    assert known <= beyond <= known * factor * SLACK + rounding


@given(profiles(), st.sampled_from(BYTES), samples)
def test_bytes_are_never_below_the_largest_measured_of_as_many_samples_or_fewer(profile, column, batch):
    measured = getattr(profile.layers[-1], column)
    most = max((value for size, value in zip(profile.batch_sizes, measured, strict=True) if size <= batch), default=0)
    assert asked(profile, column, batch) >= most


@given(profiles(), columns, st.data(), samples)
def test_an_error_in_one_measured_cost_does_not_grow(profile, column, data, batch):
    layer = profile.layers[-1]
    place = data.draw(st.integers(0, len(profile.batch_sizes) - 1))
    noise = data.draw(st.sampled_from((NOISE, 1 / NOISE)))
    values = list(getattr(layer, column))
    values[place] = round(values[place] * noise) if column in BYTES else values[place] * noise
    noisy = replace(profile, layers=(*profile.layers[:-1], replace(layer, **{column: tuple(values)})))
    one, other = sorted((asked(profile, column, batch), asked(noisy, column, batch)))
    factor = max(1, batch / profile.batch_sizes[-1])  # by which what is rounded to whole bytes may have grown
    assert other <= one * NOISE * SLACK + (1 + factor if column in BYTES else 0)


@given(profiles(), columns)
def test_ascending_costs_are_what_was_measured(profile, column):
    values = getattr(profile.layers[-1], column)
    assume(all(a <= b for a, b in pairwise(values)))
    assert [asked(profile, column, size) for size in profile.batch_sizes] == list(values)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
@example([10, 10, 12, 10])
def test_ascending_means_are_the_nearest_ascending_values(values):
    """Against the formula of max and min: max over i <= k of min over j >= k of the mean of values i, ..., j."""
    exact = [Fraction(value) for value in values]

    def mean(first: int, last: int) -> Fraction:
        return sum(exact[first : last + 1]) / (last + 1 - first)

    places = range(len(exact))
    expected = [max(min(mean(i, j) for j in places[k:]) for i in places[: k + 1]) for k in places]
    assert list(ascending_means(exact)) == expected


def test_exact_numbers_stay_exact():
    assert ascending_means((Fraction(3), Fraction(1))) == (Fraction(2), Fraction(2))
    assert ascending_peaks((3, 1, 4)) == (3, 3, 4)
    assert cost_at((2, 6), (Fraction(1), Fraction(2)), 3) == Fraction(5, 4)


def test_four_layers_that_hardly_depend_on_the_batch_do_not_make_large_batches_free():
    """A time that falls a little at the last size once gave 256 samples in less than one."""
    times = (10e-3, 10e-3, 10.2e-3, 10e-3)
    assert cost_at((1, 2, 4, 8), ascending_means(times), 256) >= 32 * 10e-3
    assert cost_at((1, 2, 4, 8), ascending_peaks((100, 100, 90, 10)), 64) == 800

from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.viz.thinning import thinned

values = st.floats(-1e3, 1e3)
short, long = st.lists(values, min_size=1, max_size=400), st.lists(values, min_size=100, max_size=200)
curves = st.one_of(short, long).map(lambda values: list(enumerate(values)))  # lists of any length are mostly short


@given(curves, st.integers(4, 60))
def test_both_ends_and_the_extremes_of_a_curve_stay(points, most):
    kept = thinned(points, most)
    values = [value for _, value in points]
    assert {points[0], points[-1]} <= set(kept)
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert kept == [point for point in points if point in set(kept)]
    assert len(kept) <= most

"""What data workers add to a step lies between two bounds, and depends on whose cores they use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.costs.loading import NOTHING, JobDataWorkers, Spread, added_by, exactly


def workers_of(*seconds, cores, machines="a", workers=1):
    names = tuple(machines * len(seconds) if len(machines) == 1 else machines)
    batches = tuple(exactly(one) for one in seconds)
    return JobDataWorkers(machines=names, cores=(cores,) * len(seconds), batches=batches, workers=workers)


def added(workers, *, iteration=10.0, bubble=0.0, copies=1):
    found = added_by(workers, iteration=iteration, bubble=bubble, copies=copies)
    return found.least, found.usual, found.most


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (workers_of(1.0, 2.0, cores=2), (1.5, 2.25, 3.0)),  # no core is left
        (workers_of(1.0, 2.0, cores=3), (0.75, 1.125, 1.5)),  # one of two workers has a core
        (workers_of(1.0, 2.0, cores=4), (0.0, 0.0, 0.0)),
        (workers_of(1.0, 2.0, cores=4, workers=2), (0.75, 1.125, 1.5)),
        (workers_of(1.0, 2.0, cores=1), (3.0, 3.0, 3.0)),  # all on one core
        (workers_of(1.0, 1.0, 1.0, 1.0, cores=2), (2.0, 3.0, 4.0)),  # four ranks on two cores
        (workers_of(1.0, 2.0, cores=1, machines="ab"), (2.0, 2.0, 2.0)),  # the machine that takes most
        (workers_of(1.0, 2.0, cores=2, workers=0), (0.0, 0.0, 0.0)),  # ranks make their batches between steps
    ],
)
def test_workers_add_what_they_need_beyond_the_other_cores(workers, expected):
    assert added(workers) == pytest.approx(expected)


def test_delays_of_copies_are_one_delay():
    """Both workers run beside each other on two cores, so a step is longer by what one of them takes."""
    assert added(workers_of(1.0, 1.0, cores=2), copies=2) == pytest.approx((1.0, 1.0, 1.0))


def test_work_in_waits_of_the_ranks_costs_nothing():
    pair = workers_of(1.0, 1.0, cores=2)
    assert added(pair, bubble=0.05) == pytest.approx((0.5, 0.7125 * 2, 0.95 * 2))
    assert added(pair, bubble=0.5) == pytest.approx((0.0, 0.75, 1.0))
    assert added_by(pair, iteration=10.0, bubble=1.0, copies=1) == NOTHING


def test_the_spread_of_what_was_measured_is_in_the_bounds():
    batches = (Spread(least=0.5, usual=1.0, most=2.0),) * 2
    two = JobDataWorkers(machines=("a", "a"), cores=(2, 2), batches=batches, workers=1)
    assert added(two, copies=2) == pytest.approx((0.5, 1.0, 2.0))


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 3),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.integers(1, 4),
)
def test_the_estimate_lies_between_its_bounds_and_no_bound_is_above_all_work(
    seconds, cores, workers, iteration, bubble, copies
):
    found = workers_of(*seconds, cores=cores, workers=workers)
    least, usual, most = added(found, iteration=iteration, bubble=bubble, copies=copies)
    assert 0 <= least <= usual <= most <= sum(seconds) * (1 + 1e-9)

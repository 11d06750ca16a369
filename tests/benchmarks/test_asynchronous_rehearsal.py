"""Rehearsed windows: what is simulated is the published formula, and all ranks run what is simulated."""

import pytest

from benchmarks.asynchronous.rehearsal import FLUSHED, SIZES, STASHED, ZB_V, Rehearsal, measure, predicted, run_of
from benchmarks.asynchronous.rehearsal_table import table_of
from diffusionpipe.costs import Link

FREE = Link()


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_with_free_messages_a_step_takes_the_time_of_its_formula(ranks, microbatches):
    times = {name: predicted(run_of(name, ranks, microbatches, FREE, 1.0)) for name in (STASHED, FLUSHED, ZB_V)}
    assert times[STASHED] == pytest.approx(3 * microbatches)
    assert times[FLUSHED] == pytest.approx(3 * (microbatches + ranks - 1))
    assert times[STASHED] < times[ZB_V] < times[FLUSHED]


def test_messages_that_take_time_make_a_window_longer_as_the_simulator_says():
    """The period of a micro-batch is (p (F + B) + 2 (p - 1) c) / p where 1F1B has p of them in flight."""
    link = Link(latency=0.1, bandwidth=1e18)
    assert predicted(run_of(STASHED, 4, 4, link, 1.0)) == pytest.approx(4 * (4 * 3 + 2 * 3 * 0.1) / 4)


@pytest.mark.slow
def test_ranks_run_windows_and_flushed_steps_in_turn():
    found = measure(2, 2, 1, forward=0.002)
    assert isinstance(found, Rehearsal)
    assert [system.name for system in found.systems] == [STASHED, FLUSHED, ZB_V]
    for system in found.systems:
        assert system.ideal <= system.simulated
        assert len(system.seconds) == 1
        assert system.seconds[0] > 0
        assert 0 <= system.idle < 1
    assert found.limit == 1.5
    assert table_of([found]).row_count == 3

"""Planted errors on ranks that wait for the true times: corrected, and followed by a layout that is faster there."""

import pytest

from benchmarks.prediction.disturbed import loop, notes_of, record, sharing_case
from benchmarks.prediction.planted import keep, planned_run, planted_cases
from diffusionpipe.costs import Link
from diffusionpipe.runtime.job.local_ranks import local_ranks


@pytest.mark.slow
def test_a_layer_that_was_said_to_take_twice_as_long_moves_the_cut_to_where_it_belongs():
    with local_ranks(2) as ranks:
        (found,) = planted_cases(ranks, ("layer",))
    assert found.present.endswith("cut before layer2")
    assert found.suggested is not None
    assert found.suggested.endswith("cut before layer3")
    assert found.gain > 0  # by 18 % on a quiet machine
    assert found.corrected == pytest.approx(found.measured, rel=0.5)  # within 3 % there


@pytest.mark.slow
def test_a_loop_is_another_program_unless_a_rank_has_started_it():
    """Whatever else this machine does meanwhile: that counts as other programs too."""
    _, _, run = planned_run(Link(1e-4, 1e9))
    with local_ranks(2) as ranks:
        ranks.run(keep)
        with loop():
            beside = ranks.run(record, run, 4, False)
        own = ranks.run(record, run, 4, True)

    def used_by_helpers(rounds):
        return rounds[0].counters[-1].end.helpers - rounds[0].counters[0].begin.helpers

    assert all(note.use.others > 0.2 and note.is_disturbed for note in notes_of([beside]))
    assert used_by_helpers(beside) == 0
    assert used_by_helpers(own) > 0.02


@pytest.mark.slow
def test_ranks_that_share_cores_are_no_other_programs():
    """Four ranks leave no core free here, so the parts of the cores add up to one if none counts twice."""
    with local_ranks(4) as ranks:
        found = sharing_case(ranks, 4)
    assert found.ours > 0.02
    assert found.counted.others + found.ours < 1.05
    assert found.others + found.ours < 1.05

"""Planted errors on ranks that wait for the true times: corrected, and followed by a layout that is faster there."""

import pytest

from benchmarks.prediction.planted import planted_cases
from diffusionpipe.runtime.local_ranks import local_ranks


@pytest.mark.slow
def test_a_layer_that_was_said_to_take_twice_as_long_moves_the_cut_to_where_it_belongs():
    with local_ranks(2) as ranks:
        (found,) = planted_cases(ranks, ("layer",))
    assert found.present.endswith("cut before layer2")
    assert found.suggested is not None
    assert found.suggested.endswith("cut before layer3")
    assert found.gain > 0  # by 18 % on a quiet machine
    assert found.corrected == pytest.approx(found.measured, rel=0.5)  # within 3 % there

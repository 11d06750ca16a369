"""Each rank that draws holds what `plan --draw` predicts."""

import pytest
from kit.drawn_families import asked_of
from kit.held_drawing import held, predicted, save_flux

from diffusionpipe.trainer.recipe import RecipePrecision


@pytest.mark.slow
def test_each_rank_holds_within_5_percent_what_is_predicted(crew, tmp_path):
    asked = asked_of(save_flux(tmp_path), 64)
    for precision in (RecipePrecision.FLOAT32, RecipePrecision.BFLOAT16):
        found = crew.run(held, asked, precision)
        for one, expected in zip(found, predicted(asked, precision, 2), strict=True):
            if isinstance(one, Exception):
                raise one
            assert one.encoders == pytest.approx(expected.encoders, rel=0.05)
            assert one.weights == pytest.approx(expected.weights, rel=0.05)
            assert one.tensors == pytest.approx(expected.tensors, rel=0.05)
            assert one.decoding == pytest.approx(expected.decoding, rel=0.05)

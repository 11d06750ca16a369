"""Each rank that draws holds what `plan --draw` predicts."""

import pytest
from drawn_families import asked_of
from held_drawing import held, predicted, save_flux

from diffusionpipe.trainer.recipe import Precision


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_each_rank_holds_within_5_percent_what_is_predicted(crew, tmp_path, precision):
    asked = asked_of(save_flux(tmp_path), 64)
    for found, expected in zip(crew.run(held, asked, precision), predicted(asked, precision, 2), strict=True):
        if isinstance(found, Exception):
            raise found
        assert found.peak == pytest.approx(expected.peak, rel=0.05)

import pytest

from diffusionpipe.ir import Op
from diffusionpipe.viz import palette


def test_a_single_stage_has_the_colours_of_the_legend():
    for op, colour in palette.OP_COLOURS.items():
        assert palette.stage_colour(op, 0, 1) == colour


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("op", [Op.F, Op.B, Op.I, Op.W])
def test_every_stage_of_a_worker_has_a_colour_of_its_own(op, num_stages):
    found = [palette.stage_colour(op, place, num_stages) for place in range(num_stages)]
    assert len(set(found)) == num_stages


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_text_is_black_on_forwards_and_white_on_weight_gradients(num_stages):
    for place in range(num_stages):
        assert not palette.is_dark(palette.stage_colour(Op.F, place, num_stages))
        assert palette.is_dark(palette.stage_colour(Op.W, place, num_stages))

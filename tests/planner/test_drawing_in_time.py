"""Drawing with denoising steps at the same time, from a profile."""

import pytest
from planner import synthetic

from diffusionpipe.holding import Workload
from diffusionpipe.planner.drawing.drawing import predict_drawing
from diffusionpipe.planner.drawing.in_time import predict_in_time
from diffusionpipe.planner.pricing.setting import Setting


def setting(ranks):
    return Setting(profile=synthetic.drawn(), cluster=synthetic.cluster(ranks), workload=Workload(batch=1))


def test_six_ranks_take_18_of_36_evaluations_in_turn_and_hold_the_whole_denoiser():
    found, alone = (
        predict_in_time(setting(6), steps=36, pictures=2, rows=4),
        predict_drawing(setting(1), pictures=2, rows=4, size=4),
    )
    assert (found.refinements, found.ranks, found.in_turn) == (2, 6, 6 + 2 * 6)
    assert found.evaluations > 36
    assert found.latency == pytest.approx(alone.encoding + 18 * alone.step)
    assert found.memory == alone.memory[0]


def test_fewer_ranks_than_blocks_evaluate_several_in_turn_and_more_than_blocks_are_idle():
    two, nine = (predict_in_time(setting(ranks), steps=36, pictures=1, rows=1) for ranks in (2, 8))
    assert two.in_turn > 36 / 2
    assert (nine.ranks, nine.in_turn) == (6, 18)
    assert predict_in_time(setting(1), steps=36, pictures=1, rows=1) is None

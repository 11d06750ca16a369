"""No other system's layout is faster than ours on the recorded questions, each simulated as that system runs it."""

import pytest
from golden.plans import predicted, questions, recorded_plan, setting_of

from diffusionpipe.planner.rivals.planners import PLANNERS
from diffusionpipe.planner.rivals.simulated import simulated

QUICK = {"paper-00-best": ("ddp", "zero3", "gpipe"), "cards-15-recomputed": ("zero3", "pipedream")}
"""The strongest rivals of two questions, in every run."""
FREE = [one for one in questions() if one.answer and not any(one.given.values())]
CASES = [pytest.param(one, QUICK[one.name], id=f"{one.name}-quick") for one in FREE if one.name in QUICK]
CASES += [pytest.param(one, tuple(PLANNERS), id=one.name, marks=pytest.mark.slow) for one in FREE]


@pytest.mark.parametrize(("question", "names"), CASES)
def test_no_layout_that_fits_is_faster_than_the_recorded_plan(question, names):
    ours = predicted(question, recorded_plan(question)).step
    setting = setting_of(question)
    rivals = simulated(names, setting)
    few = setting.cluster.num_ranks > len(setting.graph.backbone_layers)  # BaPipe has a stage for each device
    assert len(rivals) == len(set(names) - ({"bapipe"} if few else set()))
    faster = {one.planner.title: one.step / ours for one in rivals if one.proposal.overflow <= 0 and one.step < ours}
    assert not faster


def test_enough_is_compared():
    assert len(FREE) >= 8
    assert {one.name for one in FREE} >= set(QUICK)

"""No plan gets stuck on a machine whose hosts wait for every transfer, as a device synchronisation makes them."""

import random

import pytest
from kit.layout_cases import can_run, layouts_of
from kit.tiers import quick_and_slow
from planner import synthetic

from diffusionpipe.ir import Op
from diffusionpipe.planner import build_plan
from diffusionpipe.planner.from_profile import plan_from_profile
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.timing import Streams
from diffusionpipe.timing.legal import check

OPPOSED = ("bitpipe", "chimera")
"""Their workers share blocks in opposite orders: reductions that are not in one order with the messages get stuck."""
PROFILE = synthetic.unet()


def phases(plan):
    return [plan.train, plan.validate, *(plan.sample if isinstance(plan.sample, tuple) else (plan.sample,))]


@pytest.mark.parametrize("schedule", quick_and_slow(sorted(REGISTRY), quick=OPPOSED))
def test_plans_of_every_schedule_run_where_every_transfer_blocks_its_host(schedule):
    found = 0
    for stages in (1, 2, 3, 4):
        for layout in layouts_of(stages, schedule):
            if can_run(layout, PROFILE.graph):
                for phase in phases(build_plan(PROFILE.graph, layout)):
                    check(phase, streams=Streams.HOST)
                    found += any(action.op is Op.REDUCE_GRAD for _, action in phase.actions())
    assert found >= 3


@pytest.mark.parametrize("schedule", quick_and_slow(sorted(REGISTRY), quick=OPPOSED))
def test_filled_plans_run_where_every_transfer_blocks_its_host(schedule):
    chance, found = random.Random(schedule), 0
    for stages in (2, 3):
        for layout in layouts_of(stages, schedule):
            if can_run(layout, PROFILE.graph) and chance.random() < 0.6:
                plan = plan_from_profile(PROFILE, layout)
                check(plan.train, streams=Streams.HOST)
                found += bool(plan.train.fills)
    assert found >= 1 or not can_run(layouts_of(2, schedule)[0], PROFILE.graph)

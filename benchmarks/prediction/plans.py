"""The plans that are predicted and trained: the same cut, one thing after the other added."""

from dataclasses import replace

from diffusionpipe.costs import Profile
from diffusionpipe.ir import Plan
from diffusionpipe.planner import Layout, build_plan, plan_from_profile
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.search.proposal import pricing_of

BATCH = 64
CHUNK = 32
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""All that these plans do at a time is among them, so that nothing is extrapolated."""


def plans_of(profile: Profile) -> dict[str, Plan]:
    """By name: one micro-batch, four of them, four with the next batch's frozen work in the bubbles; two copies."""
    layout = Layout(batch=BATCH, stages=2, microbatches=4, encode_chunk=CHUNK)
    filled = plan_from_profile(profile, layout)
    cut = replace(layout, splits=tuple(block[0] for block in filled.blocks[1:-1]))
    return {
        "serial": _unfilled(profile, replace(cut, microbatches=1)),
        "unfilled": _unfilled(profile, cut),
        "filled": filled,
        "data parallel": _unfilled(profile, replace(layout, stages=1, microbatches=1, data_parallel=2)),
    }


def _unfilled(profile: Profile, layout: Layout) -> Plan:
    return build_plan(profile.graph, layout, pricing=pricing_of(setting_of(profile, layout.mesh, layout.batch)))

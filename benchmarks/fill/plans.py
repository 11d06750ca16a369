"""The two plans that are compared: the same stages, micro-batches and chunks; only where the encoders run differs."""

from dataclasses import dataclass, replace

from diffusionpipe.costs import Costs, Profile
from diffusionpipe.ir import Plan
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.from_profile import plan_from_profile, setting_of
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.search.proposal import pricing_of

SERIAL, FILLED = "serial", "filled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Plans and their costs on the profile's device, by name."""

    plans: dict[str, Plan]
    costs: dict[str, Costs]


def pair_of(profile: Profile, layout: Layout) -> Pair:
    """The layout with its batch encoded before the first forward, by all ranks at once, and with it in the bubbles."""
    filled = plan_from_profile(profile, layout)
    splits = tuple(block[0] for block in filled.blocks[1:-1])
    setting = setting_of(profile, layout.mesh, layout.batch)
    serial = build_plan(profile.graph, replace(layout, splits=splits), pricing=pricing_of(setting))
    assert serial.blocks == filled.blocks
    plans = {SERIAL: serial, FILLED: filled}
    costs = {name: costs_of(plan.train, plan.blocks, plan.mesh, setting) for name, plan in plans.items()}
    return Pair(plans=plans, costs=costs)

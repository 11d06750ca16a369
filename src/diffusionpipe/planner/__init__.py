"""Model graph x mesh x batch -> plan."""

from diffusionpipe.planner.build import Layout, build_plan
from diffusionpipe.planner.choice import Choice, choose
from diffusionpipe.planner.from_profile import plan_from_profile, predicted_timeline
from diffusionpipe.planner.given import Given, check_given
from diffusionpipe.planner.stage_costs import Setting

__all__ = [
    "Choice",
    "Given",
    "Layout",
    "Setting",
    "build_plan",
    "check_given",
    "choose",
    "plan_from_profile",
    "predicted_timeline",
]

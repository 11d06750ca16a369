"""Makes a plan for a model, a mesh of ranks and a batch."""

from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.from_profile import plan_from_profile, predicted_period, predicted_timeline
from diffusionpipe.planner.pricing.given import Given, check_given
from diffusionpipe.planner.pricing.setting import Setting

__all__ = [
    "Choice",
    "Given",
    "Layout",
    "Setting",
    "build_plan",
    "check_given",
    "choose",
    "plan_from_profile",
    "predicted_period",
    "predicted_timeline",
]

"""The rules of legal schedules, and `check`, which looks at all of them."""

from diffusionpipe.timing.legal.check import check, check_plan

__all__ = ["check", "check_plan"]

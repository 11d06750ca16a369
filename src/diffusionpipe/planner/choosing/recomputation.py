"""Chooses between recomputing the activations of all layers and of none."""

from diffusionpipe.planner.choosing.advice import recomputed
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.fewer import least_of
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.setting import Setting


def best_way(setting: Setting, *, fill: bool | None = None, may_recompute: bool = False) -> Choice | None:
    """The best plan of a setting; None if nothing fits, or if the batch cannot be cut over the devices.

    With `may_recompute` it is a plan with all layers recomputed, if nothing else fits or if that is clearly faster.
    `fill`: whether encoders run in bubbles; None tries both.
    """
    if least_of(setting) == float("inf"):
        return None
    best = best_choice(setting, fill=fill)
    again = recomputed(setting) if may_recompute else None
    if again is None:
        return best
    limit = best.step / (1 + NEAR_TIE) if best else float("inf")
    return best_choice(again, fill=fill, limit=limit) or best

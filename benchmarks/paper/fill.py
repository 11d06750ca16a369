"""How close a filled pipeline comes to what filling can reach."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.assembly.layout import Layout, Unfilled
from diffusionpipe.planner.filling.filler import fill_plan
from diffusionpipe.planner.filling.fills import FillPlan, frozen_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Of one layout."""

    unfilled: Seconds
    """The iteration without frozen work and its messages."""
    bound: Seconds
    """max(unfilled, (compute + frozen work) / workers): no filling of this layout is faster."""
    iteration: Seconds
    """As simulated, with all messages."""
    frozen_over_idle: float
    """Frozen work over the idle time of all workers without it."""
    bubble: float
    """Idle part of the workers' time after filling."""

    @property
    def exceeds_idle(self) -> bool:
        """Whether there is more frozen work than idle time, so that a perfect filling leaves no bubble."""
        return self.frozen_over_idle > 1

    @property
    def over_bound(self) -> float:
        """How many times as long as the bound; 1 is perfect."""
        return self.iteration / self.bound


def fill_of(setting: Setting, layout: Layout) -> Fill:
    """The filling of a layout."""
    plans: list[FillPlan] = []
    frozen = frozen_layers(setting.profile)

    def fill(unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        plans.append(fill_plan(setting, unfilled, frozen))
        return plans[-1].fills

    proposal = propose(setting, layout, fill)
    plan = plans[-1]
    return Fill(
        unfilled=plan.unfilled,
        bound=plan.bound,
        iteration=proposal.iteration,
        frozen_over_idle=plan.frozen / (len(plan.shares) * plan.unfilled - plan.busy),
        bubble=proposal.timeline.bubble,
    )

"""Finds out whether another layout would be chosen if all layer times were shorter or longer.

Computed profiles miss published speeds that nothing was fitted to by a quarter in the median (`benchmarks/anchors`).
The speed of links is not part of that: with slower layers, communication matters less, and another layout may be the
fastest.
"""

from dataclasses import dataclass, replace

from diffusionpipe.costs import LayerProfile, Profile
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.owning import owned
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import stored
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.units import Seconds

UNCERTAINTY = 0.25
"""The part by which the times of all layers may be shorter or longer than computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A layout that would be faster than the choice if all layer times were shorter, or longer, by a quarter."""

    factor: float
    """The factor of all layer times at this end of the band."""
    layout: str
    """Its schedule and sizes in words."""
    gain: float
    """The part of the choice's step that it saves at this end; more than a near-tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The step times of the chosen layout with all layer times a quarter shorter and a quarter longer."""

    shortest: Seconds
    """A step with all layer times shorter by the uncertainty."""
    longest: Seconds
    """A step with all layer times longer by the uncertainty."""
    flips: tuple[Flip, ...]
    """The layout that is faster at an end of the band, for each end with one; () if the choice stays the fastest."""


def band_of(choice: Choice, *, fill: bool | None = None) -> Band | None:
    """The band of a choice on a computed profile, with the layouts that would beat it; None on a measured one.

    At each end a search looks for steps that are shorter than the choice's; near-ties are not flips. The layouts of the
    choice's own search are not enough: with other times other numbers of micro-batches are best, and other orders are
    found. `fill`: see `choose`; the same as for the choice.
    """
    if choice.setting.profile.source == "measured":
        return None
    ends = [_end(choice, 1 + sign * UNCERTAINTY, fill) for sign in (-1, 1)]
    (shortest, _), (longest, _) = ends
    return Band(shortest=shortest, longest=longest, flips=tuple(flip for _, flip in ends if flip is not None))


def _end(choice: Choice, factor: float, fill: bool | None) -> tuple[Seconds, Flip | None]:
    """(the choice's step with all layer times multiplied by `factor`, the layout that is faster then or None)."""
    setting = stretched(choice.setting, factor)
    filler = filler_of(setting) if choice.filler else None
    own = propose(setting, choice.candidate.layout(setting), filler).step
    # A search that may look only for what is clearly faster leaves out layouts whose improvements would be.
    found = best_choice(setting.whole or setting, fill=fill, limit=own)
    if found is None or found.fastest.step > own / (1 + NEAR_TIE):
        return own, None
    return own, Flip(factor=factor, layout=found.fastest.sizes, gain=1 - found.fastest.step / own)


def stretched(setting: Setting, factor: float) -> Setting:
    """The setting with all layer times and the update's time multiplied by `factor`."""
    if setting.whole is not None:
        moved = stored(stretched(setting.whole, factor), setting.workload.encoders)
        return owned(moved, setting.owners) if setting.owners > 1 else moved
    return replace(setting, profile=_stretched(setting.profile, factor))


def _stretched(profile: Profile, factor: float) -> Profile:
    def longer(times: tuple[Seconds, ...]) -> tuple[Seconds, ...]:
        return tuple(factor * time for time in times)

    def layer(one: LayerProfile) -> LayerProfile:
        return replace(
            one,
            forward=longer(one.forward),
            input_grad=longer(one.input_grad),
            weight_grad=longer(one.weight_grad),
            forward_only=longer(one.forward_only),
            cast=factor * one.cast,
        )

    return replace(profile, layers=tuple(map(layer, profile.layers)), update=factor * profile.update)

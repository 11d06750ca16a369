"""What the uncertainty of computed layer times means for a choice.

Computed profiles miss published speeds that nothing was fitted to by a quarter in the median (`benchmarks/anchors`).
The speed of links is not part of that: with slower layers, communication matters less, and another layout may be the
fastest.
"""

from dataclasses import dataclass, replace

from diffusionpipe.costs import LayerProfile, Profile
from diffusionpipe.planner.chosen import Choice
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.offload import offloaded
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rows import sizes_in
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import TRUST
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.pool import Pool
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.units import Seconds

UNCERTAINTY = 0.25
"""The part by which all layers may be faster or slower."""
NUM_ESTIMATED = 8
"""Layouts that are considered though the search only estimated them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A layout that would be faster than the choice at one end of the band."""

    factor: float
    """Of all layer times."""
    layout: str
    gain: float
    """The part of the choice's step there that it saves; more than a near-tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The choice at both ends."""

    shortest: Seconds
    """A step with all layer times shorter,"""
    longest: Seconds
    """and with all of them longer."""
    flips: tuple[Flip, ...]
    """The fastest other layout of each end where there is one; () where the choice stays the fastest."""


def band_of(choice: Choice) -> Band | None:
    """The band of a choice on a computed profile; None on a measured one.

    Considered are all layouts that the search simulated in full, and the best that it only estimated. At each end they
    are estimated anew, and those that may be faster than the choice are simulated. The search itself is not repeated.
    """
    if choice.setting.profile.source == "measured":
        return None
    ends = [_end(choice, 1 + sign * UNCERTAINTY) for sign in (-1, 1)]
    (shortest, _), (longest, _) = ends
    return Band(shortest=shortest, longest=longest, flips=tuple(flip for _, flip in ends if flip is not None))


def _end(choice: Choice, factor: float) -> tuple[Seconds, Flip | None]:
    """The choice's step with layer times times `factor`, and what is faster then."""
    setting = stretched(choice.setting, factor)
    filler = filler_of(setting) if choice.filler else None

    own = propose(setting, choice.candidate.layout(setting), filler).step
    step, best = own / (1 + NEAR_TIE), None
    simulated = [candidate for candidate, _ in choice.search.finalists]
    estimated = [one.candidate for one in choice.search.judged[:NUM_ESTIMATED]]
    others = [one for one in dict.fromkeys((*simulated, *estimated)) if one != choice.candidate]
    for score, other in sorted(_scores(setting, others, is_filled=filler is not None), key=lambda pair: pair[0]):
        if score > TRUST * step:
            break
        proposal = propose(setting, other.layout(setting), filler)
        if proposal.overflow <= 0 and proposal.step < step:
            step, best = proposal.step, other
    if best is None:
        return own, None
    layout = f"{name_of(best)}, {sizes_in(setting, best)}{', filled' if filler else ''}"
    return own, Flip(factor=factor, layout=layout, gain=1 - step / own)


def _scores(setting: Setting, candidates: list[Candidate], *, is_filled: bool) -> list[tuple[Seconds, Candidate]]:
    """The candidates, each with an estimate of its step; 0 for two backbones, whose layouts are estimated otherwise."""
    if len(setting.graph.backbones) > 1:
        return [(0.0, candidate) for candidate in candidates]
    pool = Pool(judge=Judge(setting=setting), is_filled=is_filled)
    return [(pool.judged_of(candidate).score, candidate) for candidate in candidates]


def stretched(setting: Setting, factor: float) -> Setting:
    """The setting with all layer times times `factor`."""
    if setting.whole is not None:
        return offloaded(stretched(setting.whole, factor))
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

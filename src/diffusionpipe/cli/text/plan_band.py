"""The band of a plan on a computed profile, in words."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from diffusionpipe.planner.choosing.band import UNCERTAINTY, band_of

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.band import Band
    from diffusionpipe.planner.choosing.chosen import Choice


def band_lines(choice: Choice, *, width: int, fill: bool | None = None) -> Iterator[str]:
    """An empty line and the sentences on the band of a computed profile's step; no lines for a measured profile.

    `fill`: whether the plan may fill bubbles; None for either.
    """
    band = band_of(choice, fill=fill)
    if band is None:
        return
    yield ""
    yield from wrap(band_text(band), width, break_on_hyphens=False, break_long_words=False)


def band_text(band: Band) -> str:
    """The least and the longest step of the band, and the layouts that are faster at its ends, in sentences."""
    first = (
        f"band: layer times are computed. If all of them are {UNCERTAINTY:.0%} shorter or longer, a step takes "
        f"{band.shortest * 1e3:.1f} to {band.longest * 1e3:.1f} ms."
    )
    if not band.flips:
        return f"{first} At both ends the plan stays the fastest that is found, near-ties apart."
    flips = (
        f"with {'shorter' if flip.factor < 1 else 'longer'} layer times, {flip.layout} is {flip.gain:.1%} faster."
        for flip in band.flips
    )
    return " ".join([first, "The choice flips inside the band:", *flips, "Measure the layers before you rely on it."])

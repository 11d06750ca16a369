"""Bubble over memory: families as points, the search and the lower bound at the memory limits."""

from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.schedules.simulated import LIMITS, Family, Found
from diffusionpipe.viz.pictures import new_figure, save_figure

LATENCY = "0.1 F"
PER_RANK = 2
"""Micro-batches of the cells that are drawn."""
MOST = 0.75
"""Bubbles above are not drawn."""


def draw(cells: Sequence[Found], path: Path) -> None:
    """One panel for each number of ranks and each profile of costs, at m = 2p and with latency."""
    drawn = [found for found in cells if _is_drawn(found)]
    profiles = list(dict.fromkeys(found.cell.profile for found in drawn))
    ranks = list(dict.fromkeys(found.cell.ranks for found in drawn))
    figure = new_figure(4.6 * len(ranks), 4.2 * len(profiles))
    figure.set_layout_engine("constrained")
    for found in drawn:
        place = profiles.index(found.cell.profile) * len(ranks) + ranks.index(found.cell.ranks) + 1
        _panel(figure.add_subplot(len(profiles), len(ranks), place), found, has_legend=place == 1)
    save_figure(figure, path)


def _is_drawn(found: Found) -> bool:
    cell = found.cell
    return cell.latency == LATENCY and cell.microbatches == PER_RANK * cell.ranks and cell.ranks > 2


def _panel(axes, found: Found, *, has_legend: bool) -> None:  # type: ignore[no-untyped-def]
    cell, unit = found.cell, found.cell.one_f_one_b_peak / 2
    drawn = {LIMITS[name]: answer for name, answer in found.searched.items() if LIMITS[name] < inf}
    limits, answers = list(drawn), drawn.values()
    work = cell.in_parts(cell.work) / cell.ranks
    bounds = [1 - work / answer.bound for answer in answers]
    axes.plot(limits, bounds, "_", color="black", markersize=16, label="lower bound within the limit")
    found_at = [answer.bubble for answer in answers]
    axes.plot(limits, found_at, "o", markersize=9, color="tab:blue", alpha=0.6, label="search within the limit")
    for is_single, color, label in ((True, "tab:orange", "family"), (False, "tab:gray", "family, weights twice")):
        mine = [family for family in found.families if family.is_single is is_single and family.bubble <= MOST]
        points = [family.peak / unit for family in mine], [family.bubble for family in mine]
        axes.plot(*points, "s", markersize=4, color=color, label=label)
    for family in _named(found.families):
        place = family.peak / unit, family.bubble
        axes.annotate(family.name, place, xytext=(4, -2), textcoords="offset points", fontsize=7, color="dimgray")
    axes.set_xscale("log")
    axes.set_xticks(
        [share for share in LIMITS.values() if share < inf], [name for name in LIMITS if LIMITS[name] < inf]
    )
    axes.minorticks_off()
    axes.set_xlim(0.28, 2.9)
    axes.set_ylim(0, MOST)
    axes.set_title(f"p = {cell.ranks}, m = {cell.microbatches}, {cell.profile} costs", loc="left")
    axes.set_xlabel("activations over what 1F1B holds")
    axes.set_ylabel("bubble, simulated")
    if has_legend:
        axes.legend(frameon=False, fontsize=8)


def _named(families: Sequence[Family]) -> list[Family]:
    """1F1B and GPipe, and the families than which no other holds as little and has as small a bubble."""
    named: dict[tuple[float, float], Family] = {}
    for family in families:
        is_beaten = any(
            other.peak <= family.peak and other.bubble <= family.bubble and other.weights <= family.weights
            for other in families
            if (other.peak, round(other.bubble, 3)) != (family.peak, round(family.bubble, 3))
        )
        if family.bubble <= MOST and (not is_beaten or family.name in ("1f1b", "gpipe")):
            named.setdefault((family.peak, round(family.bubble, 3)), family)
    return list(named.values())

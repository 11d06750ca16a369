"""The short screen of `diffusionpipe plan`: batches, the choice, some alternatives, and why; `--all` has the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

from diffusionpipe.cli.text.plan_table import decimals_of, shortened, wrapped
from diffusionpipe.planner.choosing.band import UNCERTAINTY
from diffusionpipe.planner.choosing.rows import GIB, in_host_memory, parts_of, unit_of

if TYPE_CHECKING:
    from diffusionpipe.cli.text.plan_table import Line
    from diffusionpipe.planner.choosing.band import Band
    from diffusionpipe.planner.choosing.batches import BatchPlan
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.planner.choosing.explain import Comparison, Remark
    from diffusionpipe.planner.choosing.rows import Row
    from diffusionpipe.planner.pricing.setting import Setting

WIDTH = 80
MOST_LINES = 25
MOST_ALTERNATIVES = 5
LEAST_ALTERNATIVES = 2
MOST_PARTS = 5
"""Parts of a device's memory that are named one by one."""


def screen_lines(
    title: str,
    tried: Sequence[BatchPlan],
    choice: Choice,
    comparison: Comparison,
    band: Band | None,
    *,
    width: int = WIDTH,
) -> Iterator[Line]:
    """The lines of the short screen of a plan, each with its style: batches, the choice, alternatives, memory, remarks.

    Of at most 7 batches it has at most `MOST_LINES` lines, long commands apart. `tried`: a plan for each batch; `band`:
    None for a measured profile.
    """
    above = [(line, "bold") for line in wrap(title, width)[:2]]
    if len(tried) > 1:
        above += [*_batches(tried, choice, width), ("", "")]
    below = [*_reason(comparison, width), *_memory(choice, width), *_band(band, width)]
    is_alone = choice.setting.cluster.num_ranks == 1  # other systems do on one device what we do
    for remark in (one for one in comparison.remarks if one.way or not is_alone):
        below += [(line, "") for line in _remark(remark, width)]
    rows = _alternatives(replace(comparison, others=()) if is_alone else comparison)
    room = max(LEAST_ALTERNATIVES, MOST_LINES - len(above) - len(below) - len(_own(choice, width)) - 2)
    yield from above
    yield from _table(choice, rows[: min(room, MOST_ALTERNATIVES)], width)
    yield from below


def _batches(tried: Sequence[BatchPlan], choice: Choice, width: int) -> Iterator[Line]:
    """Lines of a table with a row for each batch: its rate, step, memory and layout; ">" marks the chosen batch."""
    rates = [one.rate for one in tried if one.choice]
    steps = [one.choice.step * 1e3 for one in tried if one.choice]
    yield f"{'batch':>7}  samples/s {'step ms':>9}  peak GiB  layout (>: the knee, then gains < 5 %)", "bold"
    for one in tried:
        mark = ">" if one.choice is choice else " "
        if one.choice is None:
            yield f"{mark}{one.batch:6}  does not fit", "dim"
            continue
        row = one.choice.row
        figures = (
            f"{mark}{one.batch:6} {one.rate:10.{decimals_of(rates)}f} {row.step * 1e3:9.{decimals_of(steps)}f} "
            f"{row.memory / GIB:9.1f}  "
        )
        style = "bold green" if one.choice is choice else ""
        yield figures + cut(layout_of(one.choice, is_short=True), width - len(figures)), style


def layout_of(choice: Choice, *, is_short: bool = False) -> str:
    """The name and sizes of a choice in words, with the layers that it recomputes; `is_short`: in fewer words."""
    sizes = shortened(choice.sizes) if is_short else choice.sizes
    patterns = choice.setting.workload.checkpointed
    if not patterns:
        return sizes
    which = "all layers" if patterns == ("*",) else ", ".join(patterns)
    return f"{sizes}, recomputed" if is_short else f"{sizes}, {which} recomputed"


def cut(text: str, room: int) -> str:
    """The text, shortened with "..." at its end to at most `room` columns where it is longer."""
    indent = len(text) - len(text.lstrip())
    return text if len(text) <= room else " " * indent + shorten(text, room - indent, placeholder=" ...")


def _alternatives(comparison: Comparison) -> list[Row]:
    """The best row of each name but the winner's, fastest first; rows that do not fit only where none fits."""
    found: dict[str, Row] = {}
    winner = comparison.winner
    for row in (*comparison.fewer, *comparison.ours, *comparison.others):
        if row.name != winner.name and (row.name not in found or (row.fits and not found[row.name].fits)):
            found[row.name] = row
    ranked = sorted(found.values(), key=lambda row: (not row.fits, row.step))
    return [row for row in ranked if row.fits] or ranked


def _own(choice: Choice, width: int) -> list[str]:
    return wrapped(layout_of(choice), width - _FIGURES, is_winner=True)


_FIGURES = 31
"""Columns of the figures beside a layout."""


def _table(choice: Choice, rows: Sequence[Row], width: int) -> Iterator[Line]:
    """Lines of a table of the choice and its alternatives, each with its step, idle time and memory."""
    steps, room = [1e3 * choice.step, *(1e3 * row.step for row in rows)], width - _FIGURES
    decimals = decimals_of(steps)
    yield f"{f'batch {choice.setting.workload.batch}':{room}}{'step ms':>11}{'idle':>8}{'peak GiB':>11}", "bold"
    for number, line in enumerate(_own(choice, width)):
        figures = _figures(choice.row, decimals) if not number else ""
        yield f"{line:{room}}{figures}".rstrip(), "bold green"
    for row in rows:
        text = f"  {row.name}, {shortened(row.sizes)}"
        yield f"{cut(text, room):{room}}{_figures(row, decimals)}", "" if row.fits else "dim"


def _figures(row: Row, decimals: int) -> str:
    step = f"{'' if row.use else '~'}{row.step * 1e3:.{decimals}f}"
    return f"{step:>11}{row.bubble:>8.1%}{row.memory / GIB:>11.1f}"


def _reason(comparison: Comparison, width: int) -> Iterator[Line]:
    """The lines of one sentence: the first and the last reason that the comparison's verdict gives for the choice."""
    # A verdict is sentences of grounds with semicolons between; the screen has room for two.
    grounds = comparison.verdict.split(". ")[0].rstrip(".").split("; ")
    text = "; ".join(dict.fromkeys((grounds[0], grounds[-1]))) + "."
    yield from ((line, "") for line in wrap(text, width, break_on_hyphens=False))


def _memory(choice: Choice, width: int) -> Iterator[Line]:
    """Lines that name the largest parts of the fullest device's memory; with the rest they add up to the total."""
    use = choice.row.use
    assert use, "a choice is simulated in full"
    name, unit = unit_of(use.total)
    parts = list(parts_of(use, unit).items())
    rest = sum(size for _, size in parts[MOST_PARTS:])
    named = [f"{part} {size:.2f}" for part, size in parts[:MOST_PARTS]] + ([f"others {rest:.2f}"] if rest else [])
    room = sorted({device.memory for device in choice.setting.cluster.devices})
    limits = " or ".join(f"{memory / unit:.2f}" for memory in room)
    text = f"fullest device, {name}: {', '.join(named)}; together {use.total / unit:.2f} of {limits}"
    text += in_host_memory(choice.setting)
    yield from ((line, "") for line in wrap(text, width, break_on_hyphens=False))


def _band(band: Band | None, width: int) -> Iterator[Line]:
    """Lines with the step at both ends of the band of computed times, and whether the plan is the fastest there.

    None without a band.
    """
    if band is None:
        return
    text = (
        f"band: with layer times {UNCERTAINTY:.0%} shorter or longer a step takes {band.shortest * 1e3:.1f} to "
        f"{band.longest * 1e3:.1f} ms; "
    )
    flips = [f"{flip.layout} is {flip.gain:.1%} faster at one end" for flip in band.flips]
    text += f"{' and '.join(flips)}." if flips else "the plan stays the fastest, near-ties apart."
    yield from ((line, "") for line in wrap(text, width, break_on_hyphens=False))


def _remark(remark: Remark, width: int) -> list[str]:
    """Lines with the first sentence of a remark, and the command that it suggests, if it has one."""
    # A command follows on its own line, so the sentence ends with a colon.
    first = remark.text.split(". ")[0].rstrip(".") + ("." if not remark.way else ":")
    return [*wrap(first, width, break_on_hyphens=False), *([f"  {remark.way}"] if remark.way else [])]


def title_of(name: str, setting: Setting, *, stored: str) -> str:
    """The title of a plan's screen: the model's name, the cluster, the arithmetic, and the types of stored weights."""
    cluster, profile = setting.cluster, setting.profile
    kept = f", frozen weights stored in {stored}" if stored else ""
    kept += ", trained weights in bfloat16" if setting.workload.rounds else ""
    return f"{name} on {cluster.name}: {profile.precision} arithmetic{kept}"

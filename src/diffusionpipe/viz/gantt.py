"""Timelines as a Gantt chart: PNG, SVG or PDF, by the name of the file.

rank 0   ▓▓▓░░░////▓▓▓▓▓▓░░░    computation: light forwards, dark backwards, frozen components in other hues
         ── ──      ═══════     sends and receives; gradient reduction

After the iteration comes the rest of the step, if the timeline has it. Where a rank has several stages, the second
direction's or chunk's are drawn in another hue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.ir import COMPUTE_OPS, MESSAGE_OPS, SEND_OPS, Op, Schedule, Span, Timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz import palette
from diffusionpipe.viz.copies import shown_copies
from diffusionpipe.viz.pictures import DPI, new_figure, save_figure
from diffusionpipe.viz.places import hues_of_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_WIDTH = 15.0  # inches
_LEFT, _RIGHT, _HEAD, _FOOT, _GAP = 0.85, 0.2, 0.85, 1.1, 0.75
_LANES = {"compute": (0.06, 0.62), "receive": (0.70, 0.07), "send": (0.78, 0.07), "reduce": (0.87, 0.07)}
"""Lane of a rank's row -> (offset from the top of the row, height), as fractions of the row's height."""
_LEAST_SIZE = 5.0  # points
_EDGED = 0.06
"""The width in inches from which on a bar of computation gets white edges; they would hide a narrower bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """The unit in which a drawing writes times: its name, and the number of units in a second."""

    name: str = "ms"
    per_second: float = 1000.0

    def text(self, time: Seconds, digits: int = 4) -> str:
        """The time in the axis's unit with `digits` significant digits; digits before the point are never cut."""
        value = float(time) * self.per_second
        return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


MILLISECONDS = TimeAxis()
UNITS = TimeAxis(name="time units", per_second=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A timeline to draw, with its name and its rows: which workers, under which names."""

    name: str
    timeline: Timeline
    rows: tuple[tuple[int, str], ...]
    """(worker, name of its row) of each row, from top to bottom."""


def panel_of(name: str, timeline: Timeline) -> Panel:
    """A panel with a row for each rank or, of many copies of a pipeline, of the fastest, median and slowest one."""
    rows = [
        (rank, f"{copy}: rank {rank}" if copy else f"rank {rank}")
        for copy, ranks in shown_copies(timeline).items()
        for rank in ranks
    ]
    return Panel(name=name, timeline=timeline, rows=tuple(rows))


def gantt(
    timelines: Sequence[tuple[str, Timeline] | Panel],
    path: Path,
    *,
    title: str = "",
    schedule: Schedule | None = None,
    axis: TimeAxis = MILLISECONDS,
) -> None:
    """Draw named timelines one below the other over one time axis, a row per rank, as `panel_of` chooses them.

    Computation is drawn in the rank's row and numbered by micro-batch where there is room; receives, sends and gradient
    reduction are thin bars below it; hatched time is idle. `schedule` names the frozen components, and says whether
    they run for the next batch; those too short to be seen are not named.

    Raises:
        ConfigError: the picture cannot be written, or the file name has an unknown ending.
    """
    assert timelines, "a chart needs a timeline"
    panels = [entry if isinstance(entry, Panel) else panel_of(*entry) for entry in timelines]
    shown = tuple(panel.timeline for panel in panels)
    # The rows share 12 inches, within limits.
    row = min(0.62, max(0.22, 12.0 / sum(len(panel.rows) for panel in panels)))  # inches
    heights = [len(panel.rows) * row for panel in panels]
    height = _HEAD + sum(heights) + _GAP * (len(heights) - 1) + _FOOT
    # A letter of a label is about 0.085 inches wide.
    left = max(_LEFT, 0.2 + 0.085 * max(len(label) for panel in panels for _, label in panel.rows))
    figure = new_figure(_WIDTH, height)
    names = palette.components(shown, schedule)
    end = max(timeline.step for timeline in shown) * axis.per_second or 1.0  # an empty timeline needs an axis too
    style = _Style(names=names, axis=axis, row=row, end=end, width=_WIDTH - left - _RIGHT)
    above = _HEAD
    for index, (panel, own) in enumerate(zip(panels, heights, strict=True)):
        bottom = height - above - own
        box = (left / _WIDTH, bottom / height, style.width / _WIDTH, own / height)
        axes = figure.add_axes(box, xlim=(0, end), ylim=(len(panel.rows), 0))  # row 0 at the top
        _draw_panel(axes, panel, replace(style, places=hues_of_stages(panel.timeline.spans, schedule)))
        if index == len(panels) - 1:
            axes.set_xlabel(f"time ({axis.name})" if axis.name == "ms" else axis.name, fontsize=11)
        above += own + _GAP
    figure.text(_LEFT / _WIDTH, 1 - 0.18 / height, title, fontsize=15, fontweight="bold", va="top")
    is_ahead = schedule is not None and any(pipeline.is_ahead for pipeline in schedule.placement.pipelines)
    components = _visible(shown, style)
    notes = ["numbers: micro-batches"] if _number_size(row) else []
    if is_ahead and components:
        ahead = f"of the next batch: {', '.join(components)}"
        # The title and the note are in one line; their letters are about 0.13 and 0.085 inches wide.
        is_long = 0.13 * len(title) + 0.085 * (len(ahead) + len(notes) * 24) > _WIDTH - _LEFT - _RIGHT
        notes.append("frozen layers of the next batch" if is_long else ahead)
    figure.text(
        1 - _RIGHT / _WIDTH, 1 - 0.22 / height, " · ".join(notes), fontsize=11, color="#606060", ha="right", va="top"
    )
    _legend(figure, shown, components, height, schedule)
    save_figure(figure, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    names: dict[int, str]
    """Number of a fill -> its component."""
    axis: TimeAxis
    row: float
    """Height of a rank's row in inches."""
    end: float
    """Right end of the time axis, in its unit."""
    width: float
    """Width of the time axis, in inches."""
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Stage -> its place among its rank's stages, and their number."""

    def inches(self, duration: float) -> float:
        """The width in inches of a bar of this duration, which is in the axis's unit."""
        return duration / self.end * self.width

    def colour(self, span: Span) -> str:
        """The colour of a span of computation."""
        if span.action.op is Op.ENCODE:
            assert span.action.slot is not None
            return palette.component_colours(self.names)[self.names[span.action.slot]]
        return palette.stage_colour(span.action.op, *self.places[span.action.stage])

    def fits(self, text: str, duration: float, size: float) -> bool:
        """Whether the text, in letters of `size` points, is narrower than a bar of this duration in the axis's unit."""
        # A letter is about 0.62 of its size wide, and 72 points are an inch.
        return len(text) * size * 0.62 / 72 + 0.05 <= self.inches(duration)


def _draw_panel(axes: Axes, panel: Panel, style: _Style) -> None:
    timeline = panel.timeline
    heading = (panel.name, _duration(timeline, style.axis), f"bubble {timeline.bubble:.1%}")
    axes.set_title(" · ".join(part for part in heading if part), fontsize=12, loc="left", pad=6)
    axes.set_yticks([row + 0.37 for row in range(len(panel.rows))])  # the middle of the lane of computation
    axes.set_yticklabels([label for _, label in panel.rows], fontsize=min(11, 30 * style.row))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    top, height = _LANES["compute"]
    for row in range(len(panel.rows)):
        axes.broken_barh(
            [(0, timeline.step * style.axis.per_second)],
            (row + top, height),
            facecolors="#fbfbfb",
            edgecolors="#d0d0d0",
            hatch="////",
            linewidth=0,
        )
    row_of = {worker: row for row, (worker, _) in enumerate(panel.rows)}
    _draw_bars(axes, timeline, row_of, style)
    _draw_numbers(axes, timeline, row_of, style)
    _draw_update(axes, timeline, row_of, style)


def _duration(timeline: Timeline, axis: TimeAxis) -> str:
    """The length of the iteration in the axis's unit, as text; with an update, also the lengths of step and update."""
    iteration, step = timeline.makespan, timeline.step
    if not timeline.update:
        return f"{axis.text(iteration)} {axis.name}"
    update = axis.text(step - iteration, digits=3)
    return f"step {axis.text(step)} {axis.name}: iteration {axis.text(iteration)}, update {update}"


def _draw_bars(axes: Axes, timeline: Timeline, row_of: Mapping[int, int], style: _Style) -> None:
    """Draw the spans of the timeline as bars in the rows of their workers; `row_of`: worker -> number of its row.

    It makes one collection for each row, lane and colour, which is quick also for thousands of spans.
    """
    bars: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        lane, colour = _lane(span, style)
        if lane and span.worker in row_of:
            scale = style.axis.per_second
            bars[row_of[span.worker], lane, colour].append((span.start * scale, (span.end - span.start) * scale))
    for (row, lane, colour), ranges in bars.items():
        top, height = _LANES[lane]
        edges = ["white" if lane == "compute" and style.inches(w) >= _EDGED else colour for _, w in ranges]
        axes.broken_barh(ranges, (row + top, height), facecolors=colour, edgecolors=edges, linewidth=0.6)


def _draw_update(axes: Axes, timeline: Timeline, row_of: Mapping[int, int], style: _Style) -> None:
    """Draw the phases of the update after the iteration, with their names where there is room."""
    scale, size = style.axis.per_second, _number_size(style.row)
    top, height = _LANES["compute"]
    for phase in timeline.update:
        if phase.worker not in row_of:
            continue
        row, colour = row_of[phase.worker], palette.phase_colour(phase.name)
        start, duration = phase.start * scale, (phase.end - phase.start) * scale
        edge = "white" if style.inches(duration) >= _EDGED else colour
        axes.broken_barh([(start, duration)], (row + top, height), facecolors=colour, edgecolors=edge, linewidth=0.6)
        if size and style.fits(phase.name, duration, size):
            text = "white" if palette.is_dark(colour) else "black"
            y = row + top + height / 2
            axes.text(start + duration / 2, y, phase.name, fontsize=size, color=text, ha="center", va="center_baseline")


def _lane(span: Span, style: _Style) -> tuple[str, str]:
    op = span.action.op
    if op in COMPUTE_OPS or op is Op.ENCODE:
        return "compute", style.colour(span)
    if op in MESSAGE_OPS:
        return ("send", palette.SEND) if op in SEND_OPS else ("receive", palette.RECEIVE)
    if op is Op.UNSHARD:
        return "reduce", palette.GATHER
    return ("reduce", palette.REDUCE) if op is Op.REDUCE_GRAD else ("", "")


def _number_size(row: float) -> float:
    """The size in points of the micro-batches' numbers in rows of `row` inches; 0 where they could not be read."""
    return size if (size := min(10.0, 20 * row)) >= _LEAST_SIZE else 0.0


def _draw_numbers(axes: Axes, timeline: Timeline, row_of: Mapping[int, int], style: _Style) -> None:
    size = _number_size(style.row)
    top, height = _LANES["compute"]
    for span in timeline.spans if size else ():
        action = span.action
        if span.worker not in row_of or (action.op not in COMPUTE_OPS and action.op is not Op.ENCODE):
            continue
        duration = (span.end - span.start) * style.axis.per_second
        middle = (span.start + span.end) / 2 * style.axis.per_second
        if action.op is Op.ENCODE:
            assert action.slot is not None
            texts = [style.names[action.slot]]
        else:
            # The stage is named where the rank has several.
            texts = [str(action)] * (style.places[action.stage][1] != 1) + [str(action.microbatch)]
        text = next((text for text in texts if style.fits(text, duration, size)), "")
        if text:
            colour = "white" if action.op is not Op.ENCODE and palette.is_dark(style.colour(span)) else "black"
            y = row_of[span.worker] + top + height / 2
            axes.text(middle, y, text, fontsize=size, color=colour, ha="center", va="center_baseline")


def _visible(timelines: Sequence[Timeline], style: _Style) -> dict[str, str]:
    """Frozen component -> its colour, without components whose bars together are too narrow to be seen."""
    widths: dict[str, float] = defaultdict(float)
    for timeline in timelines:
        for span in timeline.spans:
            if span.action.op is Op.ENCODE and span.action.slot is not None:
                width = style.inches((span.end - span.start) * style.axis.per_second)
                widths[style.names[span.action.slot]] += width
    colours = palette.component_colours(style.names)
    # Without those that are narrower than a dot of the picture.
    return {name: colour for name, colour in colours.items() if widths[name] >= 1 / DPI}


def _legend(
    figure: Figure,
    timelines: Sequence[Timeline],
    components: dict[str, str],
    height: float,
    schedule: Schedule | None,
) -> None:
    """Draw the legend below the timelines: the colours of operations, components, messages and parts of the update.

    `components`: frozen component -> its colour. `height`: of the figure in inches.
    """
    from matplotlib.patches import Patch

    used = {span.action.op for timeline in timelines for span in timeline.spans}
    entries: list[Patch] = [
        Patch(facecolor=colour, label=f"{model}{palette.OP_NAMES[op]}")
        for model, colours in palette.named_hues(schedule)
        for op, colour in colours.items()
        if op in used
    ]
    if palette.has_probes(timelines):
        entries.insert(0, Patch(facecolor=palette.PROBE, label=palette.PROBE_NAME))
    if palette.has_later_stages(timelines, schedule):
        entries.append(Patch(facecolor=palette.LATER_COLOURS[Op.B], label=palette.LATER_NAME))
    entries += [Patch(facecolor=colour, label=name) for name, colour in components.items()]
    if used & SEND_OPS:
        entries.append(Patch(facecolor=palette.SEND, label="send"))
    if used & (MESSAGE_OPS - SEND_OPS):
        entries.append(Patch(facecolor=palette.RECEIVE, label="receive"))
    if Op.REDUCE_GRAD in used:
        entries.append(Patch(facecolor=palette.REDUCE, label="gradient reduction"))
    if Op.UNSHARD in used:
        entries.append(Patch(facecolor=palette.GATHER, label="parameters gathered"))
    phases = dict.fromkeys(phase.name for timeline in timelines for phase in timeline.update)
    entries += [Patch(facecolor=palette.phase_colour(name), label=name) for name in phases]
    entries.append(Patch(facecolor="#fbfbfb", edgecolor="#c0c0c0", hatch="////", linewidth=0, label="idle"))
    # One row, or two closer ones if the names are too long for it, in smaller letters if still too long.
    room = _WIDTH - _LEFT
    widths = [0.62 + 0.085 * len(str(entry.get_label())) for entry in entries]
    is_one = sum(widths) <= room
    needed = sum(widths) if is_one else sum(map(max, zip_longest(widths[::2], widths[1::2], fillvalue=0.0)))
    figure.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(_LEFT / _WIDTH, (0.12 if is_one else 0.02) / height),
        borderaxespad=0,
        ncols=len(entries) if is_one else -(-len(entries) // 2),
        labelspacing=0.25,
        frameon=False,
        fontsize=11 * min(1, room / needed),
        handlelength=1.4,
        columnspacing=1.6,
    )

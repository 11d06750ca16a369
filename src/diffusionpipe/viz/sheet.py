"""Many timelines on one sheet, small, all to one time scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.ir import COMPUTE_OPS, Op, Timeline
from diffusionpipe.viz import palette
from diffusionpipe.viz.pictures import new_figure, save_figure
from diffusionpipe.viz.places import places_of_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_PANEL, _ROW, _GAP = 5.4, 0.21, 0.5
"""Width of a panel, height of a rank's row, height of a heading, in inches."""
_HEAD, _FOOT, _SIDE = 0.55, 0.6, 0.3
_LONGEST = 1.6
"""A timeline that takes longer than the shortest one times this factor is cut off at the right."""


def sheet(timelines: Sequence[tuple[str, Timeline]], path: Path, *, title: str = "") -> None:
    """Draw named timelines in columns into a picture file, from left to right and down; only computation is drawn.

    A timeline that is much longer than the shortest is cut off at the picture's edge.

    Raises:
        ConfigError: the picture cannot be written, or the file name has an unknown ending.
    """
    assert timelines, "a sheet needs a timeline"
    lines = [timelines[i : i + _COLUMNS] for i in range(0, len(timelines), _COLUMNS)]
    heights = [max(timeline.num_workers for _, timeline in line) * _ROW for line in lines]
    width = _COLUMNS * (_PANEL + _SIDE) + _SIDE
    height = _HEAD + sum(heights) + _GAP * len(lines) + _FOOT
    figure = new_figure(width, height)
    times = [timeline.makespan for _, timeline in timelines]
    end = min(max(times), _LONGEST * min(times)) or 1.0
    above = _HEAD
    for line, panel in zip(lines, heights, strict=True):
        above += _GAP
        for column, (name, timeline) in enumerate(line):
            left = _SIDE + column * (_PANEL + _SIDE)
            own = timeline.num_workers * _ROW
            box = (left / width, (height - above - own) / height, _PANEL / width, own / height)
            _draw(figure.add_axes(box, xlim=(0, end), ylim=(timeline.num_workers, 0)), name, timeline)
        above += panel
    figure.text(_SIDE / width, 1 - 0.25 / height, title, fontsize=15, fontweight="bold", va="top")
    _legend(figure, timelines, width, height)
    save_figure(figure, path)


def _draw(axes: Axes, name: str, timeline: Timeline) -> None:
    axes.set_title(name, fontsize=11, fontweight="bold", loc="left", pad=4)
    more = " →" if timeline.makespan > axes.get_xlim()[1] * 1.001 else ""
    axes.set_title(f"{timeline.makespan:g}{more} · bubble {timeline.bubble:.1%}", fontsize=10, loc="right", pad=4)
    axes.set_axis_off()
    places = places_of_stages(timeline.spans)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.action.op in COMPUTE_OPS:
            colour = palette.stage_colour(span.action.op, *places[span.action.stage])
            bars[span.worker, colour].append((span.start, span.end - span.start))
    for worker in range(timeline.num_workers):
        axes.broken_barh([(0, timeline.makespan)], (worker + 0.08, 0.84), facecolors="#f2f2f2", linewidth=0)
    for (worker, colour), ranges in bars.items():
        axes.broken_barh(ranges, (worker + 0.08, 0.84), facecolors=colour, edgecolors="white", linewidth=0.4)


def _legend(figure: Figure, timelines: Sequence[tuple[str, Timeline]], width: float, height: float) -> None:
    from matplotlib.patches import Patch

    used: set[Op] = {span.action.op for _, timeline in timelines for span in timeline.spans}
    entries = [
        Patch(facecolor=palette.OP_COLOURS[op], label=palette.OP_NAMES[op]) for op in palette.OP_COLOURS if op in used
    ]
    if palette.has_later_stages(timeline for _, timeline in timelines):
        entries.append(Patch(facecolor=palette.LATER_COLOURS[Op.B], label=palette.LATER_NAME))
    entries.append(Patch(facecolor="#f2f2f2", label="idle"))
    figure.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(_SIDE / width, 0.12 / height),
        borderaxespad=0,
        ncols=len(entries),
        frameon=False,
        fontsize=11,
    )

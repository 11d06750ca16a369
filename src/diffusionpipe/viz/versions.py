"""The first batches of a training without a flush, with a colour for each version of the weights.

rank 0   0 1 2 3 0░4 1░5 2░6 ...     light: forwards, dark: backwards; the hue says which version they read
         ────────────────┃────       a black line: the optimizer's step, after which there is a new version
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.ir import Op, Span, Timeline
from diffusionpipe.viz.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = (("#c6dbef", "#2171b5"), ("#fdd0a2", "#d95f0e"), ("#c7e9c0", "#238b45"), ("#dadaeb", "#6a51a3"))
"""The colours (forward, backward) of versions 0, 1, 2 and 3, and by turns of later ones: more rarely live at once."""
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT, _ROW = 15.0, 0.85, 0.2, 0.7, 1.0, 0.5  # inches
_STEP = "#000000"


def version_chart(
    timeline: Timeline, read: Mapping[tuple[int, Op, int], int], path: Path, *, title: str, num_microbatches: int
) -> None:
    """Draw the timeline of several windows, each action with the version of the weights that it reads, into a file.

    `read`: (stage, op, micro-batch counted over all batches) -> the version that it reads, as `versions_read` gives it.
    Bars are numbered by micro-batch of their batch.

    Raises:
        ConfigError: the picture cannot be written, or the file name has an unknown ending.
    """
    from matplotlib.patches import Patch

    ranks = timeline.num_workers
    height = _HEAD + ranks * _ROW + _FOOT
    figure = new_figure(_WIDTH, height)
    width = _WIDTH - _LEFT - _RIGHT
    box = (_LEFT / _WIDTH, _FOOT / height, width / _WIDTH, ranks * _ROW / height)
    axes = figure.add_axes(box, xlim=(0, timeline.makespan), ylim=(ranks, 0))
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time units", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for span in timeline.spans:
        _draw(axes, span, read, width / timeline.makespan, num_microbatches)
    figure.text(_LEFT / _WIDTH, 1 - 0.18 / height, title, fontsize=15, fontweight="bold", va="top")
    note = "numbers: micro-batches · light: forward · dark: backward · black line: optimizer's step"
    figure.text(1 - _RIGHT / _WIDTH, 1 - 0.22 / height, note, fontsize=11, color="#606060", ha="right", va="top")
    versions = sorted(set(read.values()))
    figure.legend(
        handles=[Patch(facecolor=HUES[v % len(HUES)][1], label=f"reads version {v}") for v in versions],
        loc="lower left",
        bbox_to_anchor=(_LEFT / _WIDTH, 0.08 / height),
        borderaxespad=0,
        ncols=min(len(versions), 8),
        frameon=False,
        fontsize=11,
        handlelength=1.4,
    )
    save_figure(figure, path)


def _draw(
    axes: Axes, span: Span, read: Mapping[tuple[int, Op, int], int], inches: float, num_microbatches: int
) -> None:
    """Draw a span as a bar in the colour of the version that its action reads, or an optimizer's step as a line.

    `inches`: the width of a unit of time.
    """
    action = span.action
    if action.op is Op.STEP:
        axes.plot([span.end, span.end], [span.worker + 0.06, span.worker + 0.94], color=_STEP, linewidth=2.2)
    if action.microbatch is None or action.op not in (Op.F, Op.B):
        return
    is_backward = action.op is Op.B
    colour = HUES[read[action.stage, action.op, action.microbatch] % len(HUES)][is_backward]
    duration = span.end - span.start
    axes.broken_barh(
        [(span.start, duration)], (span.worker + 0.12, 0.76), facecolors=colour, edgecolors="white", linewidth=0.6
    )
    text, size = str(action.microbatch % num_microbatches), 9.0
    if len(text) * size * 0.62 / 72 + 0.05 <= duration * inches:
        shade = "white" if is_backward else "black"
        middle = (span.start + span.end) / 2
        axes.text(middle, span.worker + 0.5, text, fontsize=size, color=shade, ha="center", va="center_baseline")

"""The operations of a model's layers as a picture: the longest ones, and all of them under the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.units import Seconds
from diffusionpipe.viz.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 16
FORWARD, BACKWARD, WAITING = "#3182bd", "#e6550d", "#969696"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnOperation:
    """The time, work and bytes of one kind of operation in the forward or backward of one layer, for a chart."""

    label: str
    is_backward: bool
    seconds: Seconds
    flops: float
    num_bytes: float

    @property
    def colour(self) -> str:
        """The colour of bars and points of the forward or of the backward; grey where the operation moves no bytes."""
        return WAITING if not self.num_bytes else BACKWARD if self.is_backward else FORWARD


def operation_chart(
    title: str,
    longest: Sequence[DrawnOperation],
    operations: Sequence[DrawnOperation],
    path: Path,
    *,
    peak: float,
    bandwidth: float,
) -> None:
    """Draw the longest operations as bars, and each operation's speed over its work for each byte, into a picture file.

    `peak`: floating-point operations a second, `bandwidth`: bytes a second, of the device.

    Raises:
        ConfigError: the picture cannot be written, or the file name has an unknown ending.
    """
    figure = new_figure(13, 5.6)
    bars, roof = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _bars(bars, longest[:MOST_BARS])
    _roofline(roof, operations, peak, bandwidth)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    save_figure(figure, path)


def _bars(axes: Axes, shown: Sequence[DrawnOperation]) -> None:
    places = range(len(shown))
    axes.barh(places, [one.seconds * 1e3 for one in shown], color=[one.colour for one in shown])
    axes.set_yticks(places, [one.label for one in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title("the longest operations (blue forward, orange backward, grey outside)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _roofline(axes: Axes, operations: Sequence[DrawnOperation], peak: float, bandwidth: float) -> None:
    working = [one for one in operations if one.flops and one.num_bytes and one.seconds]
    total = sum(one.seconds for one in operations)
    for one in working:
        size = 4 + 400 * one.seconds / total
        axes.scatter(one.flops / one.num_bytes, one.flops / one.seconds, s=size, color=one.colour, alpha=0.6, lw=0)
    ridge = peak / bandwidth
    intensities = [one.flops / one.num_bytes for one in working] or [ridge]
    ends = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axes.plot([ends[0], ridge, ends[1]], [bandwidth * ends[0], peak, peak], color="black", lw=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations for each byte")
    axes.set_ylabel("floating-point operations a second")
    axes.set_title("under the roofline (area: time)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)

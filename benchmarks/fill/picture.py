"""The comparison as a picture: serial beside filled iterations, measured and predicted, and the speed-ups."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.fill.plans import FILLED, SERIAL
from benchmarks.fill.real import LAYOUT, RealSpeedup
from benchmarks.fill.virtual import Speedup
from benchmarks.throughput.ratios import Ratio
from diffusionpipe.units import Seconds
from diffusionpipe.viz.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED = {SERIAL: "#8c96a3", FILLED: "#2f6db3"}
WIDTH = 0.36


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """What is drawn of one experiment."""

    name: str
    seconds: dict[str, Sequence[Seconds]]
    predicted: dict[str, Seconds]
    speedup: Ratio
    simulated: float


def draw(real: RealSpeedup, speedups: Sequence[Speedup], path: Path) -> None:
    """Left the iterations, right what filling makes of them.

    Raises:
        ConfigError: the file cannot be written, or has an unknown ending.
    """
    groups = [
        _Group(
            name=f"2 CPU ranks,\nreal compute,\nbatch {LAYOUT.batch}",
            seconds=dict(real.seconds),
            predicted=real.predicted,
            speedup=real.measured,
            simulated=real.simulated,
        ),
        *(
            _Group(
                name=f"{one.case.layout.workers} virtual ranks,\nSD 2.1,\nbatch {one.case.layout.batch}",
                seconds={name: found.seconds for name, found in one.found.items()},
                predicted={name: found.predicted.makespan for name, found in one.found.items()},
                speedup=one.measured,
                simulated=one.simulated,
            )
            for one in speedups
        ),
    ]
    figure = new_figure(5.0 + 2.6 * len(groups), 4.8)
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _iterations(left, groups)
    _speedups(right, groups)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    save_figure(figure, path)


def _iterations(axes: "Axes", groups: Sequence[_Group]) -> None:
    for side, name in ((-0.5, SERIAL), (0.5, FILLED)):
        places = [index + side * WIDTH for index in range(len(groups))]
        heights = [median(group.seconds[name]) for group in groups]
        axes.bar(places, heights, WIDTH * 0.92, color=MEASURED[name], label=f"{name}, measured (median)")
        for place, height, group in zip(places, heights, groups, strict=True):
            most = max(height, group.predicted[name])
            axes.annotate(f"{height:.2f} s", (place, most), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    ends = [
        (index + side * WIDTH - WIDTH * 0.46, index + side * WIDTH + WIDTH * 0.46, group.predicted[name])
        for index, group in enumerate(groups)
        for side, name in ((-0.5, SERIAL), (0.5, FILLED))
    ]
    first, last, predicted = zip(*ends, strict=True)
    axes.hlines(predicted, first, last, color="black", linewidth=2, label="simulated")
    axes.set_ylim(0, 1.15 * max(max(predicted), *(median(s) for group in groups for s in group.seconds.values())))
    axes.set_ylabel("iteration, s")
    _finish(axes, groups, "Iterations")


def _speedups(axes: "Axes", groups: Sequence[_Group]) -> None:
    places = range(len(groups))
    measured = [group.speedup.median for group in groups]
    errors = (
        [group.speedup.median - group.speedup.low for group in groups],
        [group.speedup.high - group.speedup.median for group in groups],
    )
    axes.bar(places, measured, WIDTH * 1.4, color=MEASURED[FILLED], yerr=errors, capsize=5, ecolor="#444444")
    for place, group in zip(places, groups, strict=True):
        axes.hlines(group.simulated, place - WIDTH * 0.7, place + WIDTH * 0.7, color="black", linewidth=2)
        text = f"{group.speedup.median:.2f}\nsimulated\n{group.simulated:.2f}"
        axes.text(place, 0.05, text, color="white", ha="center", va="bottom", fontsize=9)
    axes.axhline(1, color="#8c96a3", linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.15 * max(max(group.speedup.high, group.simulated) for group in groups))
    axes.set_ylabel("serial over filled")
    _finish(axes, groups, "Speed-up by filling, 95 % interval")


def _finish(axes: "Axes", groups: Sequence[_Group], title: str) -> None:
    axes.set_xticks(range(len(groups)), [group.name for group in groups], fontsize=9)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

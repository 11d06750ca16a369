"""The cells as a picture: samples a second of every system beside the best alternative that fits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cards.cells import FSDP, NAIVE, OURS, PEER, Cell
from diffusionpipe.planner.rivals.baselines import DDP
from diffusionpipe.viz.pictures import new_figure, save_figure

COLORS = {
    NAIVE: "#c9c9c9",
    DDP: "#8f8f8f",
    FSDP: "#5f5f5f",
    PEER: "#f2a154",
    OURS: "#1f6fb4",
}
"""In the order of the bars."""
LABELS = {PEER: "tdrussell/diffusion-pipe", OURS: "DiffusionPipe (ours)"}


def draw(cells: Sequence[Cell], path: Path) -> None:
    """One panel for each machine; a system that does not fit is marked."""
    machines = list(dict.fromkeys(cell.case.machine for cell in cells))
    figure = new_figure(12, 2.3 * len(machines) + 1.2)
    figure.set_layout_engine("constrained")
    for index, machine in enumerate(machines):
        axes = figure.add_subplot(len(machines), 1, index + 1)
        _panel(axes, machine, [cell for cell in cells if cell.case.machine == machine])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(COLORS), frameon=False)
    figure.supxlabel(
        "Simulated on analytic profiles, encoders on the fly; each system at its best sizes. x: does not fit.",
        fontsize=9,
    )
    save_figure(figure, path)


def _panel(axes: Any, machine: str, cells: Sequence[Cell]) -> None:
    width = 0.8 / len(COLORS)
    for place, (system, color) in enumerate(COLORS.items()):
        offset = (place - (len(COLORS) - 1) / 2) * width
        speeds = [_speed(cell, system) for cell in cells]
        bars = axes.bar(
            [i + offset for i in range(len(cells))], speeds, width * 0.9, color=color, label=LABELS.get(system, system)
        )
        for cell, speed, bar in zip(cells, speeds, bars, strict=True):
            text = ("x" if cell.fits else "") if not speed else _times(cell) if system == OURS else ""
            weight = "bold" if speed else "normal"
            axes.text(bar.get_x() + bar.get_width() / 2, speed + 0.03, text, ha="center", fontsize=8, weight=weight)
    for place, cell in enumerate(cells):
        if not cell.fits:
            axes.text(place, 0.08, "fits in no way", ha="center", fontsize=9, color="#777777", style="italic")
    names = [f"{cell.case.model}\nbatch {cell.case.batch}" for cell in cells]
    axes.set_xticks(range(len(cells)), names)
    axes.set_ylim(0, max(1.2, *(_speed(cell, OURS) for cell in cells)) + 0.25)
    axes.axhline(1, color="black", linewidth=0.6, linestyle=":")
    axes.set_title(machine, loc="left", fontsize=10, weight="bold")
    axes.set_ylabel("best other = 1", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _speed(cell: Cell, system: str) -> float:
    """Over the best alternative, over itself where there is none; 0 where it does not fit."""
    entry, best = cell.fitting(system), cell.best_other
    return entry.samples_per_second / (best or entry).samples_per_second if entry else 0.0


def _times(cell: Cell) -> str:
    entry = cell.fitting(OURS)
    if entry is None:
        return ""
    return f"{entry.samples_per_second:.3g}/s" + ("" if cell.best_other else "\nnothing else fits")

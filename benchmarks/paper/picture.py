"""The cells as a picture: how fast every system is beside overlapped data parallelism."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.cells import BEST, PIPELINE, Cell
from benchmarks.paper.summary import DDP, fitting
from benchmarks.rivals.copies import AHEAD, CACHED
from diffusionpipe.viz.pictures import new_figure, save_figure

LINES = {
    "1F1B + SPP": ("1F1B + SPP", "tab:orange"),
    "GPipe": ("GPipe", "tab:red"),
    "ZeRO-3 / FSDP": ("ZeRO-3", "tab:gray"),
    AHEAD: ("DDP, encodes ahead", "tab:green"),
    CACHED: ("DDP, cached outputs", "tab:olive"),
    PIPELINE: ("our pipeline, filled", "tab:cyan"),
    BEST: ("our best of all", "tab:blue"),
}


def draw(cells: Sequence[Cell], path: Path) -> None:
    """One panel for each model; a system that does not fit is left out of its cell."""
    models = list(dict.fromkeys(cell.case.model for cell in cells))
    figure = new_figure(11, 3.6 * len(models))
    figure.set_layout_engine("constrained")
    for index, model in enumerate(models):
        mine = [cell for cell in cells if cell.case.model == model]
        axes = figure.add_subplot(len(models), 1, index + 1)
        for system, (label, color) in LINES.items():
            speeds = [_speed(cell, system) for cell in mine]
            axes.plot(speeds, marker="o", linestyle="", color=color, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(mine)), [f"{cell.case.devices}\n{cell.case.per_device}" for cell in mine])
        axes.set_title(f"{model}: speed over overlapped data parallelism, simulated", loc="left")
        axes.set_xlabel("A100s, samples each")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    save_figure(figure, path)


def _speed(cell: Cell, system: str) -> float:
    ours, ddp = fitting(cell, system), fitting(cell, DDP)
    return ddp.step / ours.step if ours and ddp else float("nan")

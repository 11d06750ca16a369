"""The figures as tables."""

from rich.console import Console
from rich.table import Table

from benchmarks.throughput.ratios import Ratio

Figures = dict[str, float | Ratio]
"""Figures by name: part, what it is, and case, with "/" between them."""


def show(figures: Figures, machine: str) -> None:
    """One table for each part."""
    console = Console()
    for part, title in (
        ("real", "DiT: gradients of 32 samples in 4 micro-batches, 2 ranks of one thread"),
        ("emulated", "Waits of 20 ms forward, 40 ms backward: iteration over (m + p - 1) x 60 ms"),
        ("overhead", "Python: CPU time per action beyond bare autograd, rank 1 of 4"),
    ):
        console.print(_table(title, {name: value for name, value in figures.items() if name.startswith(f"{part}/")}))
    model = [f"{name.removeprefix('model/')} {_text(value)}" for name, value in figures.items() if "model/" in name]
    console.print("DiT:", ", ".join(model))
    console.print(machine, "\nIn brackets: bootstrap 95 % interval of the median over interleaved rounds.")


def _table(title: str, figures: Figures) -> Table:
    """Cases as rows, what was measured as columns."""
    cells = {tuple(name.split("/")[1:]): value for name, value in figures.items()}
    columns = list(dict.fromkeys(what for what, _ in cells))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for case in dict.fromkeys(case for _, case in cells):
        table.add_row(case, *(_text(cells.get((column, case))) for column in columns))
    return table


def _text(value: float | Ratio | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, Ratio) else f"{value:.3g}"

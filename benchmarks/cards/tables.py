"""The cells as tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.cards.advice import GIB, advice, reason_of
from benchmarks.cards.cells import OTHER_TRAINING, PEER, STORED, SYSTEMS, TUNED, Cell, Entry, reason_without
from benchmarks.cards.summary import summary
from benchmarks.tables import table

WIDTH = 220


def show(cells: Sequence[Cell]) -> None:
    """Speeds, what has no row, layouts with memory, the reasons, a sentence for each machine, and the summary."""
    console = Console(width=WIDTH, highlight=False)
    console.print(_speeds(cells), _tuned(cells), _missing(cells), _layouts(cells), _reasons(cells))
    for machine in dict.fromkeys(cell.case.machine for cell in cells):
        console.print(advice(cells, machine), soft_wrap=True)
    console.print(_summary(cells))
    console.print(
        "All simulated on analytic profiles: none of these devices was used. * misses the device's memory; "
        "R recomputes layers in the backward."
    )


def _place(cell: Cell) -> tuple[str, str, str]:
    return cell.case.machine, cell.case.model, str(cell.case.batch)


def _speeds(cells: Sequence[Cell]) -> Table:
    columns = ("machine", "model", "batch", "states", "encoders", *SYSTEMS, "x best", f"x {PEER}")
    made = table("Samples a second, each at its own best sizes", columns, num_left=2)
    for cell in cells:
        over = (_ratio(cell.over(cell.best_other)), _ratio(cell.over(cell.fitting(PEER))))
        speeds = (_speed(cell.entry(name)) for name in SYSTEMS)
        made.add_row(*_place(cell), cell.state, f"{cell.frozen_share:.0%}", *speeds, *over)
    return made


def _tuned(cells: Sequence[Cell]) -> Table:
    """The last columns train something else: on fixed pictures and captions, or on other weights."""
    systems = (*(name for name in TUNED if name not in OTHER_TRAINING), *OTHER_TRAINING)
    made = table(
        "\nSamples a second of data parallelism as people tune it; from cached outputs on, something else is trained",
        ("machine", "model", "batch", "DiffusionPipe", *systems),
        num_left=2,
    )
    for cell in cells:
        made.add_row(*_place(cell), *(_speed(cell.entry(name)) for name in ("DiffusionPipe", *systems)))
    return made


def _missing(cells: Sequence[Cell]) -> Table:
    made = table("\nNo row (- above)", ("system", "cells", "because"), num_left=3)
    for name in (*SYSTEMS, *TUNED, *STORED):
        if number := sum(cell.entry(name) is None for cell in cells):
            made.add_row(name, str(number), reason_without(name))
    return made


def _layouts(cells: Sequence[Cell]) -> Table:
    columns = ("machine", "model", "batch", "what", "layout", "idle", "GiB of each device", "beyond")
    made = table("\nLayouts and memory", columns, num_left=2)
    for index in (3, 4):
        made.columns[index].justify = "left"
    for cell in cells:
        for entry in cell.entries:
            held = " ".join(f"{one / GIB:.1f}" for one in entry.held)
            beyond = "" if entry.fits else f"{entry.overflow / GIB:.1f}"
            layout = f"{entry.layout}{', R' if entry.is_recomputed else ''}"
            made.add_row(*_place(cell), entry.system, layout, f"{entry.bubble:.0%}", held, beyond)
    return made


def _reasons(cells: Sequence[Cell]) -> Table:
    made = table("\nWhere ours is not 1.3 times as fast as diffusion-pipe", ("machine", "model", "because"), num_left=3)
    for cell in cells:
        if reason := reason_of(cell):
            made.add_row(*_place(cell)[:2], reason)
    return made


def _summary(cells: Sequence[Cell]) -> Table:
    made = table("\nSummary", ("", ""), num_left=1)
    for name, value in summary(cells).items():
        made.add_row(name, _ratio(value) if isinstance(value, float) else str(value))
    return made


def _speed(entry: Entry | None) -> str:
    return "-" if entry is None else f"{entry.samples_per_second:.3g}" + ("" if entry.fits else "*")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

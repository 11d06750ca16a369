"""Ways to run two backbones, simulated, and some of them measured on virtual ranks.

`python -m benchmarks.cascade [--json] [--quick] [--only TEXT] [--keep FOLDER]`
`python -m benchmarks.cascade --virtual [--json]`
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cascade.ways import MODELS, Cell, Way, cell_name, kept_cell

DEVICES = (8, 16, 32, 64)
PER_DEVICE = (1, 8)
QUICK = (8,)
WIDTH = 150
"""Columns of a table."""
OPPOSED = "opposed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cascade", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all ways and ratios as JSON, without tables")
    parser.add_argument("--quick", action="store_true", help="8 devices alone")
    parser.add_argument("--only", default="", metavar="TEXT", help='cells whose name has this, e.g. "8x1 class"')
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="finished cells are kept here, and not redone")
    parser.add_argument("--virtual", action="store_true", help="measure on virtual ranks of this machine instead")
    arguments = parser.parse_args()
    console = Console(width=WIDTH)
    if arguments.virtual:
        from benchmarks.cascade.virtual import measured_ways, virtual_table

        rows = measured_ways()
        print(json.dumps([asdict(row) for row in rows], indent=1)) if arguments.json else console.print(
            virtual_table(rows)
        )
        return
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    cells = [
        (model, devices, per_device)
        for devices in (QUICK if arguments.quick else DEVICES)
        for model in MODELS
        for per_device in PER_DEVICE
        if arguments.only in cell_name(model, devices, per_device)
    ]
    found = []
    with Console(stderr=True).status("starting") as status:
        for number, cell in enumerate(cells, 1):
            status.update(f"{number} of {len(cells)}: {cell_name(*cell)}")
            found.append(kept_cell(arguments.keep, *cell))
            if not arguments.json:
                console.print(_table(found[-1]))
    if arguments.json:
        print(json.dumps([_as_json(cell) for cell in found], indent=1))
    else:
        console.print(_summary(found))
        console.print(_fullness(found))


def _as_json(cell: Cell) -> dict[str, object]:
    """The cell with how many times as long everything takes as the fastest of ours, and as opposite directions."""
    ratios: dict[str, object] = {"over_best": cell.ratios()}
    if OPPOSED in cell.best:
        ratios["over_opposed"] = cell.ratios(OPPOSED)
    return asdict(cell) | {"ratios": ratios}


def _table(cell: Cell) -> Table:
    table = Table(
        box=None,
        title_justify="left",
        title=f"{cell.model}, {cell.devices} A100, {cell.per_device} samples each (simulated; "
        f"searched in {cell.seconds:.0f} s of one core)",
    )
    for head in ("way", "layout", "step ms", "times as long", "idle", "waits ms", "frozen ms"):
        table.add_column(head, justify="left" if head in ("way", "layout") else "right")
    best = min(way.step for way in cell.ways if way.fits)
    for way in sorted(cell.ways, key=lambda way: (not way.fits, way.step)):
        ratio = f"{way.step / best:.3f}" if way.fits else "does not fit"
        table.add_row(
            _name(way), way.layout, f"{way.step * 1e3:.1f}", ratio, f"{way.bubble:.1%}", f"{way.waits * 1e3:.1f}",
            f"{way.frozen * 1e3:.1f}",
        )  # fmt: skip
    return table


def _name(way: Way) -> str:
    return f"{way.name}, filled" if way.is_filled else way.name


def _summary(cells: Sequence[Cell]) -> Table:
    """How many times as long as opposite directions everything takes, a column for each cell."""
    with_opposed = [cell for cell in cells if OPPOSED in cell.best]
    table = Table(box=None, title_justify="left", title="Step of each way over that of opposite directions")
    table.add_column("way")
    for cell in with_opposed:
        table.add_column(f"{cell.model} {cell.devices} x {cell.per_device}", justify="right")
    ratios = [cell.ratios(OPPOSED) for cell in with_opposed]
    for name in dict.fromkeys(name for one in ratios for name in one):
        table.add_row(name, *(f"{one[name]:.2f}" if name in one else "" for one in ratios))
    return table


def _fullness(cells: Sequence[Cell]) -> Table:
    """The filled ways whose frozen work exceeds their waits, and what stays idle."""
    table = Table(box=None, title_justify="left", title="Filled with more frozen work than waits")
    for head in ("cell", "way", "waits ms", "frozen ms", "idle"):
        table.add_column(head, justify="left" if head in ("cell", "way") else "right")
    for cell in cells:
        for way in cell.ways:
            if way.is_full and way.fits:
                table.add_row(
                    cell_name(cell.model, cell.devices, cell.per_device), way.name, f"{way.waits * 1e3:.1f}",
                    f"{way.frozen * 1e3:.1f}", f"{way.bubble:.1%}",
                )  # fmt: skip
    return table


if __name__ == "__main__":
    main()

"""What people own, simulated on analytic profiles: `python -m benchmarks.cards [--json] [--out FILE] [--jobs N]`."""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.cards.advice import advice, reason_of
from benchmarks.cards.cells import MACHINES, MODELS, Case, Cell, measure
from benchmarks.cards.picture import draw
from benchmarks.cards.summary import summary
from benchmarks.cards.tables import show


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all cells and the summary as JSON, without tables")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw a picture")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the cells between")
    parser.add_argument("--only", default="", metavar="TEXT", help="models and machines whose names hold this text")
    arguments = parser.parse_args()
    cases = [Case(model=model, machine=machine) for machine in MACHINES for model in MODELS]
    cases = [case for case in cases if arguments.only in f"{case.model} on {case.machine}"]
    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("starting"))
        run = map if arguments.jobs < 2 else stack.enter_context(ProcessPoolExecutor(arguments.jobs)).map
        cells: list[Cell] = []
        for cell in run(measure, cases):
            cells.append(cell)
            status.update(f"{len(cells)} of {len(cases)} cells")
    if arguments.out:
        draw(cells, arguments.out)
    if arguments.json:
        print(json.dumps(as_plain(cells), indent=1))
    else:
        show(cells)


def as_plain(cells: Sequence[Cell]) -> dict[str, object]:
    """Everything, as JSON knows it."""
    return {
        "simulated": "on analytic profiles and assumed links; none of these devices was used",
        "summary": summary(cells),
        "advice": {machine: advice(cells, machine) for machine in dict.fromkeys(cell.case.machine for cell in cells)},
        "cells": [asdict(cell) | {"batch": cell.case.batch, "reason": reason_of(cell)} for cell in cells],
    }


if __name__ == "__main__":
    main()

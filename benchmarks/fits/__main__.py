"""Models of today on 2, 4 and 8 cards, simulated.

`python -m benchmarks.fits [--json] [--jobs N] [--only TEXT] [--bounds]`
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict

from rich.console import Console

from benchmarks.fits.cells import CAREFUL, Bound, Case, Cell, bound_of, cases, measure
from benchmarks.tables import table

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all cells and the summary as JSON, without tables")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the models between")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose names hold this text")
    parser.add_argument("--bounds", action="store_true", help="what no pipeline with adapters goes below; no search")
    arguments = parser.parse_args()
    if arguments.bounds:
        _show_bounds([bound_of(case) for case in cases() if case.has_adapters and arguments.only in case.model])
        return
    # The cells of one profile stay together, because each process keeps its profiles.
    groups: dict[tuple[str, bool, str], list[Case]] = {}
    for case in cases():
        if arguments.only in case.model:
            groups.setdefault((case.model, case.has_adapters, case.cards), []).append(case)
    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("starting"))
        run = map if arguments.jobs < 2 else stack.enter_context(ProcessPoolExecutor(arguments.jobs)).map
        cells: list[Cell] = []
        for found in run(_measured, groups.values()):
            cells += found
            status.update(f"{len(cells)} of {sum(map(len, groups.values()))} cells")
    if arguments.json:
        print(json.dumps({"summary": summary(cells), "cells": [asdict(cell) for cell in cells]}, indent=1))
    else:
        _show(cells)


def _measured(group: Sequence[Case]) -> list[Cell]:
    return [measure(case) for case in group]


def summary(cells: Sequence[Cell]) -> dict[str, int]:
    """How many cells fit."""
    adapters = [cell for cell in cells if cell.case.has_adapters]
    careful = [cell for cell in adapters if cell.stored <= CAREFUL]
    return {
        "cells_with_adapters": len(adapters),
        "of_which_fit": sum(cell.fits for cell in adapters),
        "cells_with_adapters_and_stored_weights_within_the_limit": len(careful),
        "of_these_fit": sum(cell.fits for cell in careful),
        "cells_of_whole_training": len(cells) - len(adapters),
        "of_whole_training_fit": sum(cell.fits for cell in cells) - sum(cell.fits for cell in adapters),
    }


def _show(cells: Sequence[Cell]) -> None:
    out = Console(width=170)
    columns = ["model", "trained", "cards", "state", "layout", "batch", "weights", "GiB", "beyond", "s a step"]
    figures = table("Models of today on cards", columns, num_left=5)
    for cell in cells:
        case = cell.case
        figures.add_row(
            case.model,
            "adapters" if case.has_adapters else "whole",
            f"{case.number} x {case.cards}",
            cell.state,
            cell.layout,
            str(cell.batch),
            f"{cell.stored:.0%}",
            f"{cell.fullest / GIB:.1f}",
            "" if cell.fits else f"{cell.overflow / GIB:.1f}",
            f"{cell.step:.2f}" if cell.fits else "-",
        )
    out.print(figures)
    found = summary(cells)
    out.print(
        f"Adapters fit in {found['of_which_fit']} of {found['cells_with_adapters']} cells, and in "
        f"{found['of_these_fit']} of the {found['cells_with_adapters_and_stored_weights_within_the_limit']} in which "
        f"the stored weights take at most {CAREFUL:.0%} of the memory. Whole training fits in "
        f"{found['of_whole_training_fit']} of {found['cells_of_whole_training']}."
    )


def _show_bounds(bounds: Sequence[Bound]) -> None:
    out = Console(width=170)
    columns = ["model", "cards", "weights", "inputs", "layer", "GiB", "of", "beyond"]
    figures = table("What no pipeline with adapters goes below", columns, num_left=2)
    for bound in bounds:
        sizes = (bound.weights, bound.inputs, bound.layer, bound.total, bound.room)
        beyond = max(0, bound.total - bound.room)
        figures.add_row(
            bound.case.model,
            f"{bound.case.number} x {bound.case.cards}",
            *(f"{size / GIB:.1f}" for size in sizes),
            f"{beyond / GIB:.1f}" if beyond else "",
        )
    out.print(figures)


if __name__ == "__main__":
    main()

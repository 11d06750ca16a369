"""Models of today on 1 to 8 cards, simulated.

`python -m benchmarks.fits [--json] [--jobs N] [--only TEXT] [--keep FOLDER] [--bounds]`
"""

import argparse
import json
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.fits.cells import CARDS, CAREFUL, Bound, Case, Cell, bound_of, cases, measure
from benchmarks.tables import table

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all cells and the summary as JSON, without tables")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the models between")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose names hold this text")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep cells that are done here, and go on from them; after a change of the code use another",
    )
    parser.add_argument("--bounds", action="store_true", help="what no pipeline with adapters goes below; no search")
    arguments = parser.parse_args()
    if arguments.bounds:
        _show_bounds([bound_of(case) for case in cases() if case.has_adapters and arguments.only in case.model])
        return
    asked = [case for case in cases() if arguments.only in case.model]
    # The cells of one profile stay together, because each process keeps its profiles.
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in asked:
        groups.setdefault((case.model, case.trained), []).append(case)
    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("starting"))
        run = map if arguments.jobs < 2 else stack.enter_context(ProcessPoolExecutor(arguments.jobs)).map
        cells: list[Cell] = []
        for found in run(partial(_measured, arguments.keep), groups.values()):
            cells += found
            status.update(f"{len(cells)} of {len(asked)} cells")
    if arguments.json:
        print(json.dumps({"summary": summary(cells), "cells": [asdict(cell) for cell in cells]}, indent=1))
    else:
        _show(cells)


def _measured(keep: Path | None, group: Sequence[Case]) -> list[Cell]:
    return [kept(keep, case) for case in group]


def kept(folder: Path | None, case: Case) -> Cell:
    """The cell, from the folder if it is there; a change of the code needs another folder."""
    if folder is None:
        return measure(case)
    path = folder / f"{case.model}, {case.trained}, {case.number} x {case.cards}.pickle"
    if path.is_file():
        found: Cell = pickle.loads(path.read_bytes())
        return found
    made = measure(case)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(made))
    return made


def summary(cells: Sequence[Cell]) -> dict[str, int]:
    """How many cells fit, by what is trained; "within_the_limit": those with stored weights below `CAREFUL`."""
    found: dict[str, int] = {}
    for trained in dict.fromkeys(cell.case.trained for cell in cells):
        mine = [cell for cell in cells if cell.case.trained == trained]
        careful = [cell for cell in mine if cell.stored <= CAREFUL]
        name = trained.replace(" ", "_")
        found |= {name: len(mine), f"{name}_of_which_fit": sum(cell.fits for cell in mine)}
        found |= {
            f"{name}_within_the_limit": len(careful),
            f"{name}_within_the_limit_of_which_fit": sum(cell.fits for cell in careful),
        }
    return found


def fewest(cells: Sequence[Cell]) -> Iterator[tuple[str, str, list[str]]]:
    """(model, what is trained, the fewest of each kind of cards with a layout), models first."""
    for model, trained in dict.fromkeys((cell.case.model, cell.case.trained) for cell in cells):
        mine = [cell for cell in cells if (cell.case.model, cell.case.trained) == (model, trained)]
        yield model, trained, [_fewest_of([cell for cell in mine if cell.case.cards == cards]) for cards in CARDS]


def _fewest_of(cells: Sequence[Cell]) -> str:
    """In words; of several cells of one kind of cards. "" for no cells."""
    if not cells:
        return ""
    found = min((cell for cell in cells if cell.fits), key=lambda cell: cell.case.number, default=None)
    if found is None:
        nearest = max(cells, key=lambda cell: cell.case.number)
        return f"none; {nearest.case.number} lack {nearest.overflow / GIB:.1f} GiB each"
    remarks = [found.marked] if found.state != "float32" else []
    remarks += ["one sample a step"] if found.batch < found.case.number else []
    return f"{found.case.number}" + (f" ({', '.join(remarks)})" if remarks else "")


def _show(cells: Sequence[Cell]) -> None:
    out = Console(width=190)
    columns = ["model", "trained", "cards", "state", "layout"]
    columns += ["batch", "weights", "GiB", "beyond", "host", "s a step", "CPU s"]
    figures = table("Models of today on cards", columns, num_left=5)
    for cell in cells:
        case = cell.case
        figures.add_row(
            case.model,
            case.trained,
            f"{case.number} x {case.cards}",
            cell.marked,
            cell.layout,
            str(cell.batch),
            f"{cell.stored:.0%}",
            f"{cell.fullest / GIB:.1f}",
            "" if cell.fits else f"{cell.overflow / GIB:.1f}",
            f"{cell.host / GIB:.1f}" if cell.host else "",
            f"{cell.step:.2f}" if cell.fits else "-",
            f"{cell.planning:.1f}",
        )
    out.print(figures)
    least = table("\nThe fewest cards with a layout", ["model", "trained", *CARDS], num_left=2 + len(CARDS))
    for model, trained, numbers in fewest(cells):
        least.add_row(model, trained, *numbers)
    out.print(least)
    found = summary(cells)
    for trained in dict.fromkeys(cell.case.trained for cell in cells):
        name, seconds = trained.replace(" ", "_"), sum(cell.planning for cell in cells if cell.case.trained == trained)
        out.print(
            f"{trained}: {found[f'{name}_of_which_fit']} of {found[name]} cells fit, and "
            f"{found[f'{name}_within_the_limit_of_which_fit']} of the {found[f'{name}_within_the_limit']} in which the "
            f"stored weights take at most {CAREFUL:.0%} of the memory; the searches took {seconds:.0f} CPU s"
        )


def _show_bounds(bounds: Sequence[Bound]) -> None:
    out = Console(width=170)
    columns = ["model", "base", "cards", "weights", "inputs", "layer", "GiB", "of", "beyond"]
    figures = table("What no pipeline with adapters goes below", columns, num_left=3)
    for bound in bounds:
        sizes = (bound.weights, bound.inputs, bound.layer, bound.total, bound.room)
        beyond = max(0, bound.total - bound.room)
        figures.add_row(
            bound.case.model,
            bound.case.form or "bfloat16",
            f"{bound.case.number} x {bound.case.cards}",
            *(f"{size / GIB:.1f}" for size in sizes),
            f"{beyond / GIB:.1f}" if beyond else "",
        )
    out.print(figures)


if __name__ == "__main__":
    main()

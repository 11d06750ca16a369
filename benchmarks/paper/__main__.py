"""The paper's comparison on analytic profiles: `python -m benchmarks.paper [--json] [--quick] [--jobs N]`."""

import argparse
import json
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.paper.bandwidth import Threshold, threshold
from benchmarks.paper.cells import MODELS, Case, Cell, measure
from benchmarks.paper.picture import draw
from benchmarks.paper.summary import speedup_over_best, summary
from benchmarks.paper.tables import show

DEVICES = (8, 16, 32, 64)
PER_DEVICE = (8, 16, 32, 64)
Made = TypeVar("Made")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all cells and the summary as JSON, without tables")
    parser.add_argument("--quick", action="store_true", help="SD 2.1 on 8 and 64 devices with 8 samples each")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="models with this text in their names, e.g. 'SD 2.1'"
    )
    parser.add_argument("--no-bandwidths", action="store_true", help="leave out the bandwidths at which 1.28 x begins")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the cells between")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw a picture")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep cells that are done here, and go on from them; after a change of the code use another",
    )
    arguments = parser.parse_args()
    cases, slow = ([case for case in some if arguments.only in case.model] for some in grid(is_quick=arguments.quick))
    if arguments.no_bandwidths:
        slow = []
    if not cases:
        parser.error(f"--only {arguments.only}: there are {', '.join(MODELS)}")
    started = time.perf_counter()
    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status("starting"))
        run = map if arguments.jobs < 2 else stack.enter_context(ProcessPoolExecutor(arguments.jobs)).map
        cells: list[Cell] = []
        for cell in run(partial(kept, measure, arguments.keep), cases):
            cells.append(cell)
            status.update(f"{len(cells)} of {len(cases)} cells")
        status.update("bandwidths")
        thresholds = list(run(partial(kept, threshold, arguments.keep), slow))
    figures = summary(cells, thresholds)
    if arguments.png:
        draw(cells, arguments.png)
    if arguments.json:
        print(json.dumps(as_plain(cells, thresholds, figures, time.perf_counter() - started), indent=1))
    else:
        show(cells, thresholds, figures)


def kept(make: Callable[[Case], Made], folder: Path | None, case: Case) -> Made:
    """What `make` gives for a case, from the folder if it is there; a change of the code needs another folder."""
    if folder is None:
        return make(case)
    name = f"{make.__name__}-{MODELS[case.model]}-{case.devices}-{case.per_device}.pickle"
    path = folder / name
    if path.is_file():
        found: Made = pickle.loads(path.read_bytes())
        return found
    made = make(case)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(made))
    return made


def grid(*, is_quick: bool) -> tuple[Sequence[Case], Sequence[Case]]:
    """The cells, and the cases whose bandwidth is looked for: those on 64 devices."""
    models: Iterable[str] = list(MODELS)[:1] if is_quick else MODELS
    devices, per_device = ((8, 64), (8,)) if is_quick else (DEVICES, PER_DEVICE)
    cases = [Case(model=m, devices=n, per_device=b) for m in models for n in devices for b in per_device]
    return cases, [case for case in cases if case.devices == max(DEVICES)]


def as_plain(
    cells: Sequence[Cell], thresholds: Sequence[Threshold], figures: dict[str, float | None], seconds: float
) -> dict[str, object]:
    """Everything, as JSON knows it."""
    return {
        "simulated": "on analytic profiles of an A100 with 80 GB in bfloat16; no A100 was used",
        "seconds": seconds,
        "summary": figures,
        "cells": [
            asdict(cell)
            | {
                "ceiling": cell.ceiling,
                "speedup_best_baseline": speedup_over_best(cell),
                "speedups_same_layout": {one.stages: one.speedup for one in cell.same_layout},
            }
            for cell in cells
        ],
        "thresholds": [asdict(one) for one in thresholds],
    }


if __name__ == "__main__":
    main()

"""Families and the search, simulated and measured: `python -m benchmarks.schedules [--json] [simulated|measured]`."""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.machine import machine
from benchmarks.schedules import measured
from benchmarks.schedules.costs import LATENCIES, PROFILES, Cell
from benchmarks.schedules.picture import draw
from benchmarks.schedules.simulated import Found, run_cell
from benchmarks.schedules.summary import of_families, of_limits, violations
from benchmarks.schedules.tables import show_measured, show_simulated
from diffusionpipe.ordering import Goal
from diffusionpipe.schedules import REGISTRY

RANKS = (2, 4, 8, 16)
MOST_RANKS = 32
"""With --full."""
PER_RANK = (1, 2, 4, 8)
"""Micro-batches."""


def main() -> None:
    arguments = _parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with Console(stderr=True).status("starting") as status:
        cells: list[Found] = []
        if arguments.part in (None, "simulated"):
            wanted = grid(is_quick=arguments.quick, is_full=arguments.full)
            run = partial(run_cell, objective=arguments.objective, seconds=arguments.seconds)
            with ExitStack() as stack:
                runs = map if arguments.jobs < 2 else stack.enter_context(ProcessPoolExecutor(arguments.jobs)).map
                for found in runs(run, wanted):
                    cells.append(found)
                    status.update(f"simulated {len(cells)} of {len(wanted)} cells")
        runs_measured = []
        if arguments.part in (None, "measured"):
            names = ["1f1b", "zb-v"] if arguments.quick else arguments.families
            for ranks in (4,) if arguments.quick else arguments.ranks:
                status.update(f"measuring on {ranks} ranks")
                runs_measured.append(measured.measure(names, ranks, num_rounds=arguments.rounds))
    if arguments.png:
        draw(cells, arguments.png)
    if arguments.json:
        print(json.dumps(as_plain(cells, runs_measured), indent=1))
        return
    if cells:
        show_simulated(cells)
    if runs_measured:
        show_measured(runs_measured, machine())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("simulated", "measured"), help="only this part")
    parser.add_argument("--json", action="store_true", help="print everything, every family in every cell")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 2 and 4 ranks, two families measured")
    parser.add_argument("--full", action="store_true", help=f"simulate {MOST_RANKS} ranks too")
    parser.add_argument("--objective", choices=[*Goal], default=Goal.MAKESPAN, help="what is to be short")
    parser.add_argument("--seconds", type=float, default=0.02, help="of the search, a placement and memory level")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the simulated cells")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the simulated cells")
    parser.add_argument("--ranks", type=_numbers, default=(4, 8), metavar="N,N", help="measured on so many")
    parser.add_argument("--families", type=_names, default=list(REGISTRY), metavar="A,B", help="measured")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of the measured part")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _names(text: str) -> list[str]:
    return text.split(",")


def grid(*, is_quick: bool, is_full: bool) -> list[Cell]:
    """The cells that are simulated."""
    sizes = RANKS[:2] if is_quick else (*RANKS, MOST_RANKS) if is_full else RANKS
    return [
        Cell(ranks=ranks, microbatches=each * ranks, profile=profile, latency=latency)
        for ranks in sizes
        for each in (PER_RANK[:2] if is_quick else PER_RANK)
        for profile in PROFILES
        for latency in LATENCIES
    ]


def as_plain(cells: Sequence[Found], runs: Sequence[measured.Run]) -> dict[str, object]:
    """Everything, as JSON knows it."""
    return {
        "machine": machine(),
        "simulated": [asdict(found) for found in cells],
        "limits": [asdict(one) for one in of_limits(cells)] if cells else [],
        "families": [asdict(one) for one in of_families(cells)],
        "search_beaten": [asdict(one) for one in violations(cells)],
        "measured": [asdict(run) for run in runs],
    }


if __name__ == "__main__":
    main()

"""Measures how long training stands still for a checkpoint: `python -m benchmarks.checkpoints [--json] [--quick]`."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.checkpoints.measure import Save, ratio, saves
from benchmarks.machine import machine
from benchmarks.tables import table
from diffusionpipe.runtime.job.local_ranks import local_ranks

RANKS = 2
SIZES_MB = (100, 400)
"""Of the checkpoints."""
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a small state, two rounds")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; default: the system's temporary folder")
    arguments = parser.parse_args()
    sizes, rounds = ((8,), 2) if arguments.quick else (SIZES_MB, ROUNDS)
    found: dict[int, dict[str, list[Save]]] = {}
    with local_ranks(RANKS, preload=("benchmarks.checkpoints.measure",)) as ranks:
        for size in sizes:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                found[size] = ranks.run(saves, Path(folder), size * 10**6 // RANKS, rounds)[0]
    if arguments.json:
        figures = {size: {way: [asdict(one) for one in of_way] for way, of_way in ways.items()}
                   for size, ways in found.items()}  # fmt: skip
        print(json.dumps({"machine": machine(), "saves": figures}, indent=1))
        return
    made = table("Seconds, medians of interleaved saves of two ranks", ("MB", "save", "standstill", "until written",
                 "standstill / synchronous"), num_left=2)  # fmt: skip
    for size, ways in found.items():
        for way, of_way in ways.items():
            standstill, seconds = median(one.standstill for one in of_way), median(one.seconds for one in of_way)
            relative = f"{ratio(ways):.3f}" if way == "asynchronous" else ""
            made.add_row(str(size), way, f"{standstill:.3f}", f"{seconds:.2f}", relative)
    console = Console(width=120, highlight=False)
    console.print(made)
    console.print(machine())


if __name__ == "__main__":
    main()

"""Measures what op I and op W cost beside op B: `python -m benchmarks.split [--json] [--quick]`."""

import argparse
import json
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.split.measure import Measured, measure, seconds_per_layer
from benchmarks.split.stages import Case

NUM_ROUNDS = 7
CASES = (
    Case(name="sd-2.1", resolution=256, samples=1, stages=8, stage=0),
    Case(name="sd-2.1", resolution=256, samples=1, stages=8, stage=1),
    Case(name="dit-xl-2-256", resolution=256, samples=2, stages=14, stage=1),
    Case(name="dit-xl-2-256", resolution=256, samples=2, stages=14, stage=1, checkpointed=True),
)
QUICK = (Case(name="dit-xl-2-256", resolution=64, samples=1, stages=14, stage=1),)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of tables")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one small stage, few rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_rounds = 2 if arguments.quick else NUM_ROUNDS
    found = []
    with Console(stderr=True).status("starting") as status:
        for case in QUICK if arguments.quick else CASES:
            status.update(str(case))
            found.append(measure(case, num_rounds))
        status.update("layers without work")
        per_layer = seconds_per_layer(num_rounds)
    if arguments.json:
        figures = {"machine": machine(), "seconds_per_layer": per_layer, "stages": [asdict(one) for one in found]}
        print(json.dumps(figures, indent=1))
        return
    console = Console(width=160, highlight=False)
    console.print(times(found), memory(found))
    console.print(f"Python: {per_layer * 1e6:.0f} us more for each layer that waits for W, over F, I and W together")
    console.print(machine(), "\nIn brackets: bootstrap 95 % interval of the median over interleaved rounds.")


def times(found: list[Measured]) -> Table:
    """One line for each stage and way."""
    columns = ("F s", "B or I s", "W s", "F", "backward", "F and backward")
    made = _table("One thread; ratios to the whole backward", "stage", "backward", *columns)
    for one in found:
        for name, way in one.ways.items():
            seconds = [f"{s:.3f}" for s in way.seconds] + [""] * (3 - len(way.seconds))
            ratios = [""] * 3 if name == "whole" else [str(way.forward), str(way.backward), str(way.both)]
            made.add_row(str(one.case), name, *seconds, *ratios)
        for name, error in one.failed.items():
            made.add_row(str(one.case), name, *[""] * 5, error[:40])
    return made


def memory(found: list[Measured]) -> Table:
    """One line for each stage and way."""
    made = _table("MiB that live, without weights and their gradients", "stage", "backward", *_MOMENTS)
    for one in found:
        for name, way in one.ways.items():
            live = [f"{b / 2**20:.1f}" for b in way.live]
            if len(live) == 2:
                live.insert(1, "")
            made.add_row(str(one.case), name, *live, f"{way.peak / 2**20:.1f}")
    return made


_MOMENTS = ("after F", "after I", "after B or W", "peak")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    main()

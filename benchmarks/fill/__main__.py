"""Measures what filling bubbles gains: `python -m benchmarks.fill [--json] [--quick] [--random-only] [--png FILE]`."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fill import cases, real, virtual
from benchmarks.fill.picture import draw
from benchmarks.fill.plans import FILLED, SERIAL
from benchmarks.machine import machine
from diffusionpipe.planner.assembly.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often everything is measured."""

    random_cases: int
    real_rounds: int
    cases: tuple[virtual.Case, ...]


FULL = Effort(
    random_cases=2000,
    real_rounds=25,
    cases=(
        virtual.Case(layout=Layout(batch=128, stages=4, microbatches=8), iteration=1.5, num_rounds=15),
        virtual.Case(layout=Layout(batch=256, stages=8, microbatches=16), iteration=2.0, num_rounds=15),
    ),
)
QUICK = Effort(
    random_cases=50,
    real_rounds=2,
    cases=(virtual.Case(layout=Layout(batch=32, stages=2, microbatches=4), iteration=0.5, num_rounds=2),),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fill", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of tables")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 2 virtual ranks, few rounds")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw iterations and speed-ups")
    parser.add_argument("--random-only", action="store_true", help="the random iterations alone, which run nothing")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    effort = QUICK if arguments.quick else FULL
    console = Console(width=140, highlight=False)
    with Console(stderr=True).status("random iterations") as status:
        random = cases.fill_cases(effort.random_cases)
        if arguments.random_only:
            print(json.dumps(_random(random), indent=2)) if arguments.json else console.print(_random_table(random))
            return
        status.update("real compute on 2 ranks")
        on_cpu = real.measure(effort.real_rounds)
        status.update("profile of SD 2.1")
        profile = virtual.profile()
        speedups = []
        for case in effort.cases:
            status.update(f"{case.layout.workers} virtual ranks")
            speedups.append(virtual.measure(profile, case))
    if arguments.json:
        figures = {
            "machine": machine(),
            "random": _random(random),
            "real": _real(on_cpu),
            "virtual": [_virtual(found) for found in speedups],
        }
        print(json.dumps(figures, indent=2))
    else:
        console.print(_random_table(random), _real_table(on_cpu), _virtual_table(speedups))
        console.print(machine(), "\nIn brackets: bootstrap 95 % interval of the median over interleaved rounds.")
    if arguments.png:
        draw(on_cpu, speedups, arguments.png)


def _random(found: list[cases.Filled]) -> dict[str, Any]:
    ratios = [one.ratio for one in found]
    return {
        "cases": len(found),
        "iteration_over_bound": {
            "median": median(ratios),
            "p95": cases.percentile(ratios, 0.95),
            "maximum": max(ratios),
        },
        "longer_than_allowed": [one.seed for one in found if not one.is_within],
        "planning_s": {"median": median(one.planning for one in found), "maximum": max(one.planning for one in found)},
    }


def _random_table(found: list[cases.Filled]) -> Table:
    figures = _random(found)
    ratio, planning, longer = (figures[name] for name in ("iteration_over_bound", "planning_s", "longer_than_allowed"))
    columns = ("cases", "median", "p95", "maximum", "planning, median ms", "maximum ms", "longer than allowed")
    table = _table("Random iterations: filled over the lower bound", *columns)
    table.add_row(
        str(figures["cases"]),
        *(f"{ratio[name]:.4f}" for name in ("median", "p95", "maximum")),
        *(f"{planning[name] * 1e3:.1f}" for name in ("median", "maximum")),
        f"{len(longer)}{': seeds ' + ', '.join(map(str, longer)) if longer else ''}",
    )
    return table


def _real(found: real.RealSpeedup) -> dict[str, Any]:
    return {
        "frozen_share": found.frozen_share,
        "seconds": found.seconds,
        "cpu_seconds": found.cpu,
        "predicted_seconds": found.predicted,
        "speedup": {"median": found.measured.median, "low": found.measured.low, "high": found.measured.high},
        "simulated_speedup": found.simulated,
    }


def _virtual(found: virtual.Speedup) -> dict[str, Any]:
    layout = found.case.layout
    return {
        "ranks": layout.workers,
        "batch": layout.batch,
        "microbatches": layout.microbatches,
        "seconds": {name: list(one.seconds) for name, one in found.found.items()},
        "predicted_seconds": {name: one.predicted.makespan for name, one in found.found.items()},
        "prediction_error": {name: one.error for name, one in found.found.items()},
        "bubble": {name: dict(zip(("measured", "predicted"), found.bubble(name), strict=True)) for name in found.found},
        "speedup": {"median": found.measured.median, "low": found.measured.low, "high": found.measured.high},
        "simulated_speedup": found.simulated,
        "measured_over_simulated": found.measured_over_simulated,
        "scale": found.scale,
        "bytes_scale": found.bytes_scale,
        "link": {"latency_s": found.link.latency, "bytes_per_s": found.link.bandwidth},
    }


def _real_table(found: real.RealSpeedup) -> Table:
    title = f"2 CPU ranks, real compute, batch {real.LAYOUT.batch}, frozen work {found.frozen_share:.0%} of the trained"
    table = _table(title, "", "iteration s", "fastest s", "CPU s", "predicted s", "speed-up", "simulated")
    for name in (SERIAL, FILLED):
        last = (str(found.measured), f"{found.simulated:.3f}") if name == FILLED else ("", "")
        seconds, cpu = median(found.seconds[name]), median(found.cpu[name])
        fastest = min(found.seconds[name])
        table.add_row(name, f"{seconds:.3f}", f"{fastest:.3f}", f"{cpu:.3f}", f"{found.predicted[name]:.3f}", *last)
    return table


def _virtual_table(speedups: list[virtual.Speedup]) -> Table:
    columns = ("iteration s", "predicted s", "error", "bubble", "predicted", "speed-up", "simulated", "quotient")
    table = _table("Virtual ranks: SD 2.1, 512 px, analytic A100 profile", "", *columns)
    for found in speedups:
        layout = found.case.layout
        for name in (SERIAL, FILLED):
            one, (measured, predicted) = found.found[name], found.bubble(name)
            is_last = name == FILLED
            table.add_row(
                f"{layout.workers} ranks, {layout.microbatches} x {layout.batch // layout.microbatches}, {name}",
                f"{median(one.seconds):.3f}",
                f"{one.predicted.makespan:.3f}",
                f"{one.error:+.2%}",
                f"{measured:.1%}",
                f"{predicted:.1%}",
                str(found.measured) if is_last else "",
                f"{found.simulated:.3f}" if is_last else "",
                f"{found.measured_over_simulated:.4f}" if is_last else "",
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    main()

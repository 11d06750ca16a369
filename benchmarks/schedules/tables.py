"""The figures as tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.schedules.measured import Run
from benchmarks.schedules.simulated import LIMITS, Found
from benchmarks.schedules.summary import of_families, of_limits, violations
from benchmarks.tables import table

WIDTH = 180


def show_simulated(cells: Sequence[Found]) -> None:
    """Limits, families, cells, and where the search was beaten."""
    console = Console(width=WIDTH, highlight=False)
    console.print(_limits(cells), "", _families(cells), "", _cells(cells), "")
    beaten = violations(cells)
    console.print(f"A family that fits is better than the search: {len(beaten)} times")
    for one in beaten:
        cell = one.cell
        console.print(
            f"  p={cell.ranks} m={cell.microbatches} {cell.profile} latency {cell.latency}, limit {one.limit}: "
            f"{one.family} {one.of_family:.6g}, search {one.of_search:.6g}"
        )


def _limits(cells: Sequence[Found]) -> Table:
    made = table(
        "By memory limit, over what 1F1B holds",
        (
            "limit",
            "fastest families (cells)",
            "cells",
            "too small",
            "search over bound",
            "most",
            "optimal",
            "best family over search",
            "most",
            "beaten",
            "search CPU s",
            "most",
        ),
        num_left=2,
    )
    for one in of_limits(cells):
        wins = ", ".join(f"{name} {count}" for name, count in one.wins[:6])
        made.add_row(
            one.limit,
            wins,
            str(one.cells),
            str(one.too_small),
            f"{one.over_bound:.1%}",
            f"{one.over_bound_most:.1%}",
            str(one.optimal),
            f"{one.best_over_search:+.1%}",
            f"{one.best_over_search_most:+.1%}",
            str(one.violations),
            f"{one.seconds:.2f}",
            f"{one.seconds_most:.1f}",
        )
    return made


def _families(cells: Sequence[Found]) -> Table:
    columns = (
        "family",
        "cells",
        "weights",
        "peak over 1F1B's",
        "bubble",
        "window bubble",
        "over bound",
        "generated in at most CPU s",
    )
    made = table("Families, medians over the cells that they can do", columns, num_left=1)
    for one in of_families(cells):
        low, high = one.peak
        made.add_row(
            one.name,
            str(one.cells),
            f"{one.weights:g}x",
            f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}",
            f"{one.bubble:.1%}",
            f"{one.window_bubble:.1%}",
            "" if one.over_bound is None else f"{one.over_bound:.1%}",
            f"{one.seconds_most:.2f}",
        )
    return made


def _cells(cells: Sequence[Found]) -> Table:
    title = "Bubbles: the best family of one copy that fits / the search / the least that is possible"
    made = table(title, ("p", "m", "costs", "latency", *(f"limit {limit}" for limit in LIMITS)), num_left=4)
    for found in cells:
        cell = found.cell
        sizes = (str(cell.ranks), str(cell.microbatches), cell.profile, cell.latency)
        made.add_row(*sizes, *(_text(found, limit) for limit in LIMITS))
    return made


def _text(found: Found, limit: str) -> str:
    answer = found.searched.get(limit)
    if answer is None:
        return "nothing fits"
    best = found.best(limit)
    least = 1 - found.cell.in_parts(found.cell.work) / (found.cell.ranks * answer.bound)
    family = f"{best[0].name} {best[0].idle(found.objective):.1%}" if best else "none"
    return f"{family} / {answer.idle(found.objective):.1%} / {least:.1%}"


def show_measured(runs: Sequence[Run], machine: str) -> None:
    """One table for all runs."""
    console = Console(width=WIDTH, highlight=False)
    columns = (
        "family",
        "ranks",
        "m",
        "ideal ms",
        "predicted",
        "measured",
        "over predicted",
        "over drawn",
        "over ideal",
        "torch ms",
        "ours over torch",
        "rounds",
    )
    made = table("Processes with virtual stages", columns, num_left=1)
    for run in runs:
        for case in run.cases:
            made.add_row(
                case.family,
                str(case.ranks),
                str(case.microbatches),
                f"{case.ideal * 1e3:.0f}",
                f"{case.predicted * 1e3:.0f}",
                f"{case.ours * 1e3:.0f}",
                f"{case.error:+.1%}",
                f"{case.ours / case.drawn - 1:+.1%}",
                f"{case.ours / case.ideal - 1:+.1%}",
                "" if case.torch is None else f"{case.torch * 1e3:.0f}",
                "" if case.ours_over_torch is None else str(case.ours_over_torch),
                str(case.rounds),
            )
    console.print(made)
    for run in runs:
        delays = f"an action is late by {run.action_delay * 1e6:.0f} us, a message takes {run.message * 1e6:.0f} us"
        console.print(f"{run.ranks} ranks: {delays} (medians)")
    console.print(machine)

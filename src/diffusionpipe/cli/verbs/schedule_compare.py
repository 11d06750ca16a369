"""`diffusionpipe schedule compare`: every family side by side, at the same sizes and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffusionpipe.simulator.comparison import FamilyComparison, FamilyResult, WorkerCosts

MAX_TIME = 1e15
"""The longest time that an option may give. Floating-point sums of longer times would lose the short ones."""
MAX_COMPARED = 2048
"""The most forwards (ranks times micro-batches) for which all families are made within half a minute."""


def compare(
    ranks: Annotated[int, typer.Option(metavar="P", min=1, help="Number of ranks.")],
    microbatches: Annotated[int, typer.Option(metavar="M", min=1, help="Micro-batches of one iteration.")],
    forward: Annotated[
        float, typer.Option(metavar="t", min=0, max=MAX_TIME, help="Time of a forward of one rank's part of the model.")
    ] = 1,
    input_grad: Annotated[
        float, typer.Option(metavar="t", min=0, max=MAX_TIME, help="Time of the gradient of its inputs.")
    ] = 1,
    weight_grad: Annotated[
        float, typer.Option(metavar="t", min=0, max=MAX_TIME, help="Time of the gradient of its weights.")
    ] = 1,
    comm: Annotated[
        float, typer.Option(metavar="t", min=0, max=MAX_TIME, help="Time of a message between two ranks.")
    ] = 0,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="L",
            min=0,
            max=MAX_TIME,
            help="Activations that fit on a rank; 1 is the activations of one rank's part of the model for one "
            "micro-batch.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw all of them on one sheet (.png, .svg, .pdf).")] = None,
) -> None:
    """Compare all schedules: makespan, bubble, activations, messages, weights.

    The model is the same for all: one rank's part of it is 1/P. Schedules with several stages on a rank cut it finer.
    Times may be in any unit; the figures are in the same unit.
    """
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.simulator.comparison import WorkerCosts, compare_families

    check_outputs(pictures=[png])
    if ranks * microbatches > MAX_COMPARED:
        raise ConfigError(
            f"{ranks} ranks x {microbatches} micro-batches are {ranks * microbatches:,} forwards, and at most "
            f"{MAX_COMPARED:,} are compared; use fewer ranks or micro-batches"
        )
    costs = WorkerCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=comm)
    comparison = compare_families(ranks, microbatches, costs)
    if as_json:
        _print_json(comparison, costs, ranks=ranks, microbatches=microbatches, memory=memory)
    else:
        _print_table(comparison, costs, ranks=ranks, microbatches=microbatches, memory=memory)
    if png:
        from diffusionpipe.viz.sheet import sheet

        title = f"{ranks} ranks, {microbatches} micro-batches, {_costs(costs)}"
        sheet([(result.name, result.timeline) for result in comparison.results], png, title=title)
        typer.echo(f"wrote {png}", err=True)


def _costs(costs: WorkerCosts) -> str:
    times = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "message": costs.latency}
    return ", ".join(f"{name} {time:g}" for name, time in times.items())


def _fits(result: FamilyResult, memory: float | None) -> bool:
    # Peaks are sums of fractions, so equality needs a hair of room.
    return memory is None or result.peak <= memory + 1e-9


def _print_table(
    comparison: FamilyComparison, costs: WorkerCosts, *, ranks: int, microbatches: int, memory: float | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    heading = f"{ranks} ranks, {microbatches} micro-batches; {_costs(costs)}"
    table = Table(box=None, pad_edge=False, header_style="bold", title=heading, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for name in ("makespan", "bubble", "window bubble", "peak activations", "messages", "weights"):
        table.add_column(name, justify="right")
    for result in comparison.results:
        table.add_row(
            result.name,
            f"{result.makespan:.6g}",
            f"{result.timeline.bubble:.1%}",
            f"{result.window_bubble:.1%}",
            f"{result.peak:g}",
            str(result.messages),
            f"{result.weights:g}x",
            style="" if _fits(result, memory) else "dim",
        )
    console = Console(highlight=False)
    console.print(table)
    if memory is not None:
        lacking = [result.name for result in comparison.results if not _fits(result, memory)]
        if lacking:
            console.print(f"\ndo not fit in {memory:g} activations: {', '.join(lacking)}", soft_wrap=True)
    for name, why in comparison.undefined.items():
        console.print(f"\n{name}: {why}", soft_wrap=True)
    console.print(
        "\nwindow bubble: the idle part between a rank's first start and its last end. It counts where the optimizer's "
        "step does not wait for all ranks (training.post_validation). peak activations: the most that a rank holds; "
        "1 is the activations of one rank's part of the model (1/P) for one micro-batch. weights: parts of "
        "the model (1/P) on a rank."
    )


def _print_json(
    comparison: FamilyComparison, costs: WorkerCosts, *, ranks: int, microbatches: int, memory: float | None
) -> None:
    from dataclasses import asdict

    from diffusionpipe.ir.codec import layout

    rows = [
        {
            "name": result.name,
            "makespan": round(result.makespan, 9),
            "bubble": round(result.timeline.bubble, 9),
            "window": round(result.window, 9),
            "window_bubble": round(result.window_bubble, 9),
            "peak_activations": list(result.peaks),
            "messages": result.messages,
            "weights": result.weights,
            "fits": _fits(result, memory),
        }
        for result in comparison.results
    ]
    question = {"ranks": ranks, "microbatches": microbatches, **asdict(costs), "memory": memory}
    typer.echo(layout(question | {"schedules": rows, "undefined": dict(comparison.undefined)}))

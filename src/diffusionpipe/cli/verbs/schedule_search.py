"""`diffusionpipe schedule search`: the best order for given stages, ranks and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from diffusionpipe.ir import Schedule, Timeline
    from diffusionpipe.ordering import Answer, Instance


def search(
    instance: Annotated[Path, typer.Argument(metavar="INSTANCE", help="The instance, a JSON file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures and orders as JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture (.svg).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the schedule file.")] = None,
) -> None:
    """Search for the order with the shortest iteration for uneven stages, slow links and little memory.

    docs/schedule-search.md describes the instance and the answer. `schedule instance` writes the instance of a profiled
    model on a cluster.
    """
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.ordering import search as search_order
    from diffusionpipe.ordering.instance_file import read_instance

    question = read_instance(instance)
    check_outputs(perfetto, out, pictures=(png, svg))
    answer = search_order(question)
    if as_json:
        _print_json(answer)
        if not (png or svg or perfetto or out):  # a large schedule takes a while to make and simulate
            return
    from diffusionpipe.ordering import costs_of, schedule_of
    from diffusionpipe.simulator import simulate

    schedule = schedule_of(answer)
    timeline = simulate(schedule, costs_of(question, answer.placement))
    if not as_json:
        _print_report(question, answer, timeline)
    _write_files(question, schedule, timeline, pictures=(png, svg), perfetto=perfetto, out=out)


def _heading(question: Instance) -> str:
    ranks, microbatches = question.ranks, question.microbatches
    return f"{ranks} rank{'s' * (ranks > 1)}, {microbatches} micro-batch{'es' * (microbatches > 1)}"


def _number(value: float) -> str:
    """The number as text with up to ten digits; an int has all its digits."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _print_json(answer: Answer) -> None:
    import json

    figures = {
        "placement": str(answer.placement),
        "makespan": answer.makespan,
        "window": answer.window,
        "bubble": round(answer.bubble, 12),
        "peak_memory": list(answer.peak_memory),
        "orders": [],
        "lower_bound": answer.lower_bound,
        "optimal": answer.optimal,
        "family": answer.family,
    }
    text = json.dumps(figures, indent=2)
    # One order a line: indented action by action a file would have thousands of lines.
    orders = ",\n    ".join(json.dumps([str(action) for action in order]) for order in answer.orders)
    typer.echo(text.replace('"orders": []', f'"orders": [\n    {orders}\n  ]'))


def _print_report(question: Instance, answer: Answer, timeline: Timeline) -> None:
    from rich.console import Console

    from diffusionpipe.viz import explained_sketch

    console = Console(highlight=False)
    console.print(f"[bold]{_heading(question)}[/bold]\n")
    console.print(explained_sketch(timeline, width=console.width), markup=False, soft_wrap=True)
    console.print()
    console.print(_figures(question, answer))
    console.print()
    console.print(_ranks(question, answer, timeline))
    console.print(
        "\nbusy, idle: times within the makespan. peak memory: the most that the rank holds in activations. "
        "limit: the instance's memory_limit."
    )


def _figures(question: Instance, answer: Answer) -> Table:
    """A table of the answer's placement, order, makespan, window and bubble ratio, each with its meaning."""
    from rich.table import Table

    proof = (
        "no order has a shorter one (proven)"
        if answer.optimal
        else f"no order is below {_number(answer.lower_bound)} (lower bound)"
    )
    meanings = {
        "makespan": "from the first start to the last end",
        "window": "the longest time from one rank's first start to its last end",
    }
    # The proof is about the figure that the search made small.
    meanings[str(question.objective)] += f"; {proof}"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    table.add_row("placement", str(answer.placement), _placement_text(answer))
    table.add_row("order", "", _origin_text(answer.family))
    table.add_row("makespan", _number(answer.makespan), meanings["makespan"])
    table.add_row("window", _number(answer.window), meanings["window"])
    table.add_row("bubble ratio", f"{answer.bubble:.2%}", f"the idle part of all ranks' {question.objective}")
    return table


def _placement_text(answer: Answer) -> str:
    """A clause that says which half-stages of the model rank i has, for the answer's placement."""
    last = len(answer.orders) - 1
    match str(answer.placement):
        case "linear":
            return "rank i has half-stages 2i and 2i + 1 as one stage"
        case "v":
            return f"rank i has half-stages i and {2 * last + 1} - i: the model goes down the ranks and back up"
        case _:
            return f"rank i has half-stages i and {last + 1} + i: the model goes over the ranks twice"


def _origin_text(family: str) -> str:
    """The origin of the orders in words: the published family, or the rule of the search."""
    # A plus at the end marks an order that was improved.
    name, is_improved = family.rstrip("+"), family.endswith("+")
    if name == "search drawn":
        origin = "by a randomly chosen rule of the search"
    elif name.startswith("search "):
        origin = "by one of the search's own rules"
    else:
        origin = f"the published schedule {name}"
    return f"{origin}, then improved" if is_improved else origin


def _ranks(question: Instance, answer: Answer, timeline: Timeline) -> Table:
    """A table with each rank's busy and idle time, peak memory, and memory limit."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "busy", "idle", "peak memory", "limit"):
        table.add_column(heading, justify="right")
    limits = question.memory_limit or ("none",) * question.ranks
    for rank, (peak, limit) in enumerate(zip(answer.peak_memory, limits, strict=True)):
        busy = timeline.busy(rank)
        limit_text = limit if isinstance(limit, str) else _number(limit)
        table.add_row(str(rank), _number(busy), _number(timeline.makespan - busy), _number(peak), limit_text)
    return table


def _write_files(
    question: Instance,
    schedule: Schedule,
    timeline: Timeline,
    *,
    pictures: tuple[Path | None, ...],
    perfetto: Path | None,
    out: Path | None,
) -> None:
    """Write the pictures, the trace and the schedule file, each where its path is not None.

    Notices go to stderr, so that stdout has only the requested output.
    """
    from diffusionpipe import viz
    from diffusionpipe.ir.files import write_schedule

    for picture in pictures:
        if picture:
            viz.gantt([("", timeline)], picture, title=_heading(question), schedule=schedule, axis=viz.UNITS)
    if perfetto:
        viz.perfetto(timeline, perfetto, schedule=schedule)
    if out:
        write_schedule(schedule, out)
    for path in (*pictures, perfetto, out):
        if path:
            typer.echo(f"wrote {path}", err=True)

"""`diffusionpipe schedule`: the picture of a schedule and its costs, with a model cut into equal parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.verbs.default_verb import DEFAULT, DefaultVerb
from diffusionpipe.cli.verbs.schedule_compare import MAX_TIME, compare
from diffusionpipe.cli.verbs.schedule_instance import instance
from diffusionpipe.cli.verbs.schedule_search import search

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.table import Table

    from diffusionpipe.ir import Schedule, Timeline
    from diffusionpipe.simulator.comparison import WorkerCosts
    from diffusionpipe.units import Seconds

MAX_FORWARDS = 50_000

VersionsOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Show the schedule without flushes, with weights stashed, vertical, delayed, newest or predicted "
        "(docs/asynchronous.md).",
    ),
]
CsvOption = Annotated[
    bool,
    typer.Option(
        "--csv",
        help="Print the orders as torch.distributed.pipelining's CSV; its schedules read it by "
        '_load_csv(FILE, format="compute_only").',
    ),
]
DelayOption = Annotated[
    int | None, typer.Option(min=1, metavar="D", help="With --versions delayed: the age of all weights; default 1.")
]

app = typer.Typer(cls=DefaultVerb, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("compare")(compare)
app.command("search")(search)
app.command("instance")(instance)


@app.callback()
def schedule() -> None:
    """Draw a schedule and print its makespan, bubble and activations."""


@app.command("list")
def list_names() -> None:
    """List the names of the schedules, each with one line of description."""
    from diffusionpipe.plugins import Kind, offered
    from diffusionpipe.schedules import REGISTRY

    width = max(map(len, REGISTRY))
    for name, generator in REGISTRY.items():
        first_line = (generator.__doc__ or "").partition("\n")[0]
        typer.echo(f"{name:{width}}  {first_line}")
    for name in offered(Kind.SCHEDULE):
        typer.echo(f"{name:{width}}  From a package.")
    typer.echo("\np workers (the ranks of one pipeline), m micro-batches, stage s; F forward, I and W gradients of the")
    typer.echo("inputs and of the weights, which a backward computes together.")


@app.command(
    DEFAULT,
    epilog="[bold]diffusionpipe schedule list[/bold] lists the names, [bold]compare[/bold] compares them all, "
    "[bold]search[/bold] finds an order for an instance, and [bold]instance[/bold] writes one for a model. "
    "docs/orders.md describes the files of orders.",
)
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="The schedule, e.g. 1f1b or gpipe, or a file of orders (.csv, .json or .rules)."
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option(metavar="P", help="Number of ranks; not needed for a .csv or .json file.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Micro-batches of one iteration; not needed for such a file.")
    ] = None,
    forward: Annotated[str, typer.Option(metavar="t", help="Time of a forward of one rank's part of the model.")] = "1",
    input_grad: Annotated[str, typer.Option(metavar="t", help="Time of the gradient of the inputs.")] = "1",
    weight_grad: Annotated[
        str, typer.Option(metavar="t", help="Time of the gradient of the weights; a backward takes both.")
    ] = "1",
    comm: Annotated[str, typer.Option(metavar="t", help="Time of a transfer between two ranks.")] = "0",
    versions: VersionsOption = None,
    delay: DelayOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures and orders as JSON.")] = False,
    as_csv: CsvOption = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the schedule file.")] = None,
) -> None:
    """Draw a schedule of a model in equal parts, and print its makespan, bubble and activations.

    A file of orders is checked first: docs/orders.md.

    One rank's part is 1/P of the model, even if a schedule cuts it into several stages. Times may be in any unit; the
    figures are in the same unit.
    """
    from diffusionpipe.cli.verbs.outputs import check_outputs

    texts = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "comm": comm}
    question = _question(name, (ranks, microbatches), texts, is_ambiguous=as_json and as_csv)
    check_outputs(perfetto, out, pictures=(png,))
    if versions is not None or delay is not None:
        from diffusionpipe.cli.verbs.schedule_versions import asked, show_versions

        asking = asked(question.name, (ranks, microbatches), versions, delay, is_csv=as_csv)
        show_versions(asking, _costs(question), as_json=as_json, files=(png, perfetto, out))
        return
    answer = _answer(question)
    if as_json:
        _print_json(question, answer)
    elif as_csv:
        from diffusionpipe.ir.torch_csv import schedule_to_csv

        typer.echo(schedule_to_csv(answer.schedule), nl=False)
    else:
        _print_report(question, answer)
    _write_files(answer, png=png, perfetto=perfetto, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    name: str
    """The name of a family, or the path of a file of orders."""
    ranks: int | None
    microbatches: int | None
    """The number of micro-batches; it and `ranks` may be None for a file."""
    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    comm: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    """Activations that each rank holds at most; 1: its part of the model's activations for one micro-batch."""

    @property
    def heading(self) -> str:
        """The title of the picture: the schedule's name, ranks and micro-batches."""
        schedule = self.schedule
        microbatches = _count(schedule.num_microbatches(), "micro-batch")
        return f"{schedule.name}, {_count(schedule.num_workers, 'rank')}, {microbatches}"


def _question(
    name: str, sizes: tuple[int | None, int | None], texts: dict[str, str], *, is_ambiguous: bool
) -> _Question:
    """The checked question of a command line.

    `sizes`: ranks and micro-batches. `texts`: option -> text of each time. `is_ambiguous`: both --json and --csv.

    Raises:
        ConfigError: names everything that is wrong at once.
    """
    from diffusionpipe.errors import ConfigError

    ranks, microbatches = sizes
    given = {option: size for option, size in (("ranks", ranks), ("microbatches", microbatches)) if size is not None}
    problems = _wrong_name(name, given)
    problems += [f"--{option} is {size}; use a number of at least 1" for option, size in given.items() if size < 1]
    # Before a schedule is made: a large one takes long and much memory.
    if ranks and microbatches and min(ranks, microbatches) > 0 and ranks * microbatches > MAX_FORWARDS:
        problems.append(
            f"{ranks} ranks x {microbatches} micro-batches are more than {MAX_FORWARDS:,} forwards; use fewer"
        )
    times = {option: _time(text) for option, text in texts.items()}
    problems += [
        f"--{option} is {texts[option][:40]}; use a number from 0 to 1e15"
        for option, time in times.items()
        if time is None
    ]
    if is_ambiguous:
        problems.append("--json and --csv exclude each other; use one of them")
    if problems:
        raise ConfigError("\n".join(problems))
    forward, input_grad, weight_grad, comm = (time or 0 for time in times.values())
    return _Question(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        comm=comm,
    )


def _wrong_name(name: str, sizes: Collection[str]) -> list[str]:
    """The problems with a schedule's name: no family has it, or --ranks or --microbatches is missing.

    `sizes`: which of these two are given. A file of orders has no problem.
    """
    from difflib import get_close_matches

    from diffusionpipe.plugins import Kind, offered
    from diffusionpipe.schedules import REGISTRY, is_published
    from diffusionpipe.schedules.files.order_file import is_order_file

    if is_order_file(name):
        return []
    if is_published(name) or name in offered(Kind.SCHEDULE):
        missing = [option for option in ("ranks", "microbatches") if option not in sizes]
        return [f"--{option} is missing; {name} suits any number, so give one" for option in missing]
    close = get_close_matches(name.lower(), REGISTRY, n=1)
    hint = f"did you mean {close[0]}?" if close else "`diffusionpipe schedule list` lists the names"
    return [f"no schedule is called {name!r}; {hint}"]


def _time(text: str) -> Seconds | None:
    """The time that an option's text states, an int where it is written so; None if it is not from 0 to `MAX_TIME`."""
    try:
        # Whole numbers stay exact through the simulation.
        time = int(text) if text.strip().lstrip("+").isdecimal() else float(text)
    except ValueError:
        return None
    return time if 0 <= time <= MAX_TIME else None


def _schedule(question: _Question) -> Schedule:
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.schedules import generator_of
    from diffusionpipe.schedules.files.order_file import is_order_file, read_orders

    if not is_order_file(question.name):
        assert question.ranks is not None
        assert question.microbatches is not None
        return generator_of(question.name)(question.ranks, question.microbatches)
    schedule = read_orders(Path(question.name), question.ranks, question.microbatches)
    num_forwards = sum(len(p.stages) * len(p.microbatches) for p in schedule.placement.pipelines)
    if num_forwards > MAX_FORWARDS:
        raise ConfigError(f"{question.name}: {num_forwards:,} forwards are more than {MAX_FORWARDS:,}; use fewer")
    return schedule


def _answer(question: _Question) -> _Answer:
    from diffusionpipe.simulator.comparison import measure

    schedule = _schedule(question)
    result = measure(schedule.name, schedule, _costs(question))
    return _Answer(schedule=schedule, timeline=result.timeline, peaks=result.peaks)


def _costs(question: _Question) -> WorkerCosts:
    from diffusionpipe.simulator.comparison import WorkerCosts

    return WorkerCosts(
        forward=question.forward,
        input_grad=question.input_grad,
        weight_grad=question.weight_grad,
        latency=question.comm,
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _number(value: float) -> str:
    """The number as text with up to ten digits; an int has all its digits."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _rounded(value: float) -> float:
    """The value rounded to 12 decimals, which removes the noise of sums of decimal fractions; an int stays as it is."""
    return value if isinstance(value, int) else round(value, 12)


def _print_report(question: _Question, answer: _Answer) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from diffusionpipe.viz import explained_sketch

    console = Console(highlight=False)
    timeline = answer.timeline
    backward = question.input_grad + question.weight_grad
    times = f"forward {_number(question.forward)}, backward {_number(backward)}, transfer {_number(question.comm)}"
    console.print(f"[bold]{escape(answer.heading)}[/bold]: {times}\n", soft_wrap=True)
    console.print(explained_sketch(timeline, width=console.width), markup=False, soft_wrap=True)
    console.print()
    console.print(_figures(timeline))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "busy", "idle", "peak activations"):
        table.add_column(heading, justify="right")
    for rank, peak in enumerate(answer.peaks):
        busy = timeline.busy(rank)
        table.add_row(str(rank), _number(busy), _number(timeline.makespan - busy), _number(peak))
    console.print(table)
    console.print(
        "\nbusy, idle: times within the makespan. peak activations: the most that the rank holds at once; 1 is the "
        "activations of one rank's part of the model (1/P) for one micro-batch."
    )


def _figures(timeline: Timeline) -> Table:
    """A table of two rows, makespan and bubble ratio, each with its value and its meaning."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    table.add_row("makespan", _number(timeline.makespan), "from the first start to the last end")
    table.add_row("bubble ratio", f"{timeline.bubble:.2%}", "the idle part of all ranks' makespan")
    return table


def _print_json(question: _Question, answer: _Answer) -> None:
    from dataclasses import asdict

    from diffusionpipe.ir.codec import layout

    schedule = answer.schedule
    ranks = range(schedule.num_workers)
    sizes = {"name": schedule.name, "ranks": schedule.num_workers, "microbatches": schedule.num_microbatches()}
    figures = {
        **asdict(question),
        **sizes,
        "makespan": _rounded(answer.timeline.makespan),
        "bubble": _rounded(answer.timeline.bubble),
        "busy": [_rounded(answer.timeline.busy(rank)) for rank in ranks],
        "peak_activations": list(answer.peaks),
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
    }
    typer.echo(layout(figures))


def _write_files(answer: _Answer, *, png: Path | None, perfetto: Path | None, out: Path | None) -> None:
    """Write the picture, the trace and the schedule file, each where its path is not None.

    Notices go to stderr, so that stdout has only the requested output.
    """
    from diffusionpipe import viz
    from diffusionpipe.ir.files import write_schedule

    if png:
        viz.gantt([("", answer.timeline)], png, title=answer.heading, schedule=answer.schedule, axis=viz.UNITS)
    if perfetto:
        viz.perfetto(answer.timeline, perfetto, schedule=answer.schedule)
    if out:
        write_schedule(answer.schedule, out)
    for path in (png, perfetto, out):
        if path:
            typer.echo(f"wrote {path}", err=True)

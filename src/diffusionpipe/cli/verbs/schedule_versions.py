"""`diffusionpipe schedule NAME --versions ROW`: batches that follow each other without a flush, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction
    from pathlib import Path

    from diffusionpipe.ir import Schedule, Timeline
    from diffusionpipe.ir.versions import Staleness, Versions
    from diffusionpipe.simulator.comparison import WorkerCosts
    from diffusionpipe.simulator.steady import Steady
    from diffusionpipe.units import Seconds

SHOWN = 3
"""The number of batches that are drawn after the first ones, which only fill the pipeline."""
MAX_SIMULATED = 500_000
"""The most forwards that the search for the steady state may simulate at first: they take about twenty seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """The window of a training without flushes, its steady state and versions of weights, and its first batches."""

    window: Schedule
    versions: Versions
    """The kind of weights: stashed, delayed, ..."""
    unrolled: Schedule
    """The first batches as one schedule: `lead` batches of the window and `SHOWN` more."""
    timeline: Timeline
    """The timeline of the unrolled schedule."""
    steady: Steady
    """The period and the bubble of the steady state."""
    flushed: Seconds
    """The makespan of the same family with a flush after each batch."""
    staleness: Staleness
    """(stage, op) -> the staleness of each micro-batch."""
    held: Mapping[int, int]
    """Block -> versions of its weights that live at once."""

    @property
    def heading(self) -> str:
        """A line with the schedule's name, ranks, micro-batches and kind of weights, as a title."""
        ranks, count = self.window.num_workers, self.window.num_microbatches()
        plural = "es" if count > 1 else ""
        return f"{self.window.name}, {ranks} ranks, {count} micro-batch{plural} a batch, weights {self.versions}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """The schedule, sizes and kind of weights that a command line asks for."""

    family: str
    ranks: int
    microbatches: int
    versions: Versions
    delay: int
    """The age of delayed weights in steps; without effect on other kinds."""


def asked(
    family: str, sizes: tuple[int | None, int | None], versions: str | None, delay: int | None, *, is_csv: bool
) -> VersionOptions:
    """The options, checked that they go together; `sizes` are ranks and micro-batches.

    Raises:
        ConfigError: unknown versions, a delay that has no effect, a file in place of a family, or --csv.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.schedules import is_published

    known = [row for row in Versions if row is not Versions.FLUSHED]
    if versions is None or (delay is not None and versions != Versions.DELAYED):
        raise ConfigError("--delay is for --versions delayed; leave it out, or give both")
    if versions not in known:
        raise ConfigError(f"--versions is {versions}; use {', '.join(known[:-1])} or {known[-1]}")
    if is_csv:
        raise ConfigError("--csv: torch's format has no versions of weights; use --out for a schedule file")
    if not is_published(family):
        raise ConfigError("--versions needs the name of a family such as 1f1b; a file of orders has a flush")
    ranks, microbatches = sizes
    assert ranks is not None
    assert microbatches is not None
    return VersionOptions(
        family=family, ranks=ranks, microbatches=microbatches, versions=Versions(versions), delay=delay or 1
    )


def overlapped(asking: VersionOptions, costs: WorkerCosts) -> Overlapped:
    """The window of the family without flushes, its steady state, and its first batches, simulated.

    Raises:
        ConfigError: the family has no window, the delay is too short, or the sizes are too large.
    """
    from dataclasses import replace

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.unroll import unroll
    from diffusionpipe.ir.versions import staleness_of, versions_held
    from diffusionpipe.passes import with_versions
    from diffusionpipe.planner.assembly.windows import overlap
    from diffusionpipe.schedules import generator_of
    from diffusionpipe.simulator.comparison import equal_costs
    from diffusionpipe.simulator.simulate import simulate
    from diffusionpipe.simulator.steady import first_batches, steady

    sizes = asking.ranks, asking.microbatches
    bare = replace(overlap(*sizes, asking.family), name=asking.family)
    simulated = asking.ranks * asking.microbatches * first_batches(bare)
    if simulated > MAX_SIMULATED:
        raise ConfigError(
            f"{asking.ranks} ranks x {asking.microbatches} micro-batches without a flush: batches repeat after "
            f"{simulated:,} simulated forwards, more than {MAX_SIMULATED:,}; use fewer"
        )
    window = with_versions(bare, asking.versions, asking.delay)
    # After `lead` batches the pipeline is full, and three more show the steady state.
    unrolled, flushed = unroll(window, window.lead + SHOWN), generator_of(asking.family)(*sizes)
    return Overlapped(
        window=window,
        versions=asking.versions,
        unrolled=unrolled,
        timeline=simulate(unrolled, equal_costs(unrolled, costs)),
        steady=steady(window, lambda schedule: equal_costs(schedule, costs)),
        flushed=simulate(flushed, equal_costs(flushed, costs)).makespan,
        staleness=staleness_of(window),
        held=versions_held(window),
    )


def show_versions(
    asking: VersionOptions,
    costs: WorkerCosts,
    *,
    as_json: bool,
    files: tuple[Path | None, Path | None, Path | None],
) -> None:
    """Prints the steady state of the window, and writes the `files` that are not None: picture, trace, schedule file.

    Raises:
        ConfigError: the family has no window, the delay is too short, the sizes are too large, or a file cannot be
            written.
    """
    from diffusionpipe.ir.codec import layout

    found = overlapped(asking, costs)
    if as_json:
        typer.echo(layout(figures_of(found)))
    else:
        print_overlapped(found)
    png, perfetto, out = files
    write_overlapped(found, png=png, perfetto=perfetto, out=out)


def print_overlapped(found: Overlapped) -> None:
    """Prints the sketch of the first batches, the steady state, and the weights that each rank reads and holds."""
    from rich.console import Console
    from rich.table import Table

    from diffusionpipe.ir import Op
    from diffusionpipe.viz import explained_sketch

    console = Console(highlight=False)
    console.print(
        f"[bold]{found.heading}[/bold]: the first {_batches(found)} batches, without a flush\n", soft_wrap=True
    )
    console.print(explained_sketch(found.timeline, width=console.width), markup=False, soft_wrap=True)
    console.print()
    figures = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        figures.add_column(justify=justify, no_wrap=justify != "left" or not figures.columns)
    period = found.steady.period
    figures.add_row("period", _number(period), "from the end of a batch to the end of the next one")
    figures.add_row("idle", f"{float(found.steady.bubble):.2%}", "the idle part of it")
    figures.add_row("with a flush", _number(found.flushed), f"{float(found.flushed / period):.3g} times as long")
    console.print(figures)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("rank", "staleness of forwards", "staleness of backwards", "versions held"):
        table.add_column(head, justify="right" if head in ("rank", "versions held") else "left")
    for rank, (stage, block) in enumerate(_stages(found.window)):
        staleness = (" ".join(map(str, found.staleness[stage, op])) for op in (Op.F, Op.B))
        table.add_row(str(rank), *staleness, str(found.held[block]))
    console.print(table)
    console.print(
        "\nstaleness: by how many steps the weights that a micro-batch reads are older than those from which its own "
        "step starts. versions held: copies of the rank's weights that live at once. docs/asynchronous.md explains "
        "each kind."
    )


def figures_of(found: Overlapped) -> dict[str, object]:
    """The period, idle part, staleness and versions of the window as values for JSON, by name."""
    from diffusionpipe.ir import Op

    stages = _stages(found.window)
    return {
        "versions": str(found.versions),
        "period": float(found.steady.period),
        "idle": float(found.steady.bubble),
        "flushed": float(found.flushed),
        "staleness_of_forwards": [list(found.staleness[stage, Op.F]) for stage, _ in stages],
        "staleness_of_backwards": [list(found.staleness[stage, Op.B]) for stage, _ in stages],
        "versions_held": [found.held[block] for _, block in stages],
        "window": [" ".join(map(str, order)) for order in found.window.orders],
    }


def write_overlapped(found: Overlapped, *, png: Path | None, perfetto: Path | None, out: Path | None) -> None:
    """Writes a picture with versions in colours, a trace of the first batches, and the window as a schedule file.

    A path that is None is not written.

    Raises:
        ConfigError: a file cannot be written.
    """
    from diffusionpipe import viz
    from diffusionpipe.ir.files import write_schedule
    from diffusionpipe.ir.versions import versions_read
    from diffusionpipe.viz.versions import version_chart

    if png:
        read = versions_read(found.window, _batches(found))
        version_chart(found.timeline, read, png, title=found.heading, num_microbatches=found.window.num_microbatches())
    if perfetto:
        viz.perfetto(found.timeline, perfetto, schedule=found.unrolled)
    if out:
        write_schedule(found.window, out)
    for path in (png, perfetto, out):
        if path:
            typer.echo(f"wrote {path}", err=True)


def _batches(found: Overlapped) -> int:
    return found.window.lead + SHOWN


def _stages(window: Schedule) -> list[tuple[int, int]]:
    """(stage, block) of each worker, in order: a window has one stage on each worker."""
    of_worker = {stage.worker: (index, stage.weights) for index, stage in enumerate(window.placement.stages)}
    return [of_worker[worker] for worker in range(window.num_workers)]


def _number(value: Fraction | Seconds) -> str:
    return f"{float(value):.10g}"

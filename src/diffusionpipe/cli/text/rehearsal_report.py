"""The findings of a rehearsal, as figures and as a screen."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from diffusionpipe.costs import Costs, Link, Profile
from diffusionpipe.ir import Plan
from diffusionpipe.planner.pricing.stage_costs import update_time
from diffusionpipe.runtime.machine.cores import num_cores
from diffusionpipe.simulator import simulate
from diffusionpipe.workflows.rehearsing.rehearsal import Rehearsed, seconds_by_kind
from diffusionpipe.workflows.rehearsing.size import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measured times of a rehearsal, with its scales, link and the cores that other programs used."""

    result: Rehearsed
    """The measured and predicted timelines."""
    size: Size
    """The number and the lengths of the iterations, as they were predicted."""
    link: Link
    """The measured link between the ranks' processes."""
    scale: float
    """Factor from the plan's times of compute to the waits."""
    bytes_scale: float
    """Factor from the plan's sizes of tensors to the sizes sent."""
    others: float | None
    """Cores that other programs kept busy meanwhile; None where the system does not tell."""


def figures_of(outcome: Outcome, plan: Plan, profile: Profile, costs: Costs) -> dict[str, Any]:
    """The figures of a rehearsal for JSON, by name, in seconds and bytes.

    Keys: "scale", "bytes_scale", "link", "iteration", "bubble", "processor_share", "processor" (cores),
    "memory_bytes", "planned" (the plan's own times) and "ranks".
    """
    found = outcome.result
    ranks = []
    for rank in range(found.mesh.num_ranks):
        measured = [seconds_by_kind(timeline, rank) for timeline in found.measured]
        ranks.append(
            {
                "rank": rank,
                "predicted_s": seconds_by_kind(found.predicted, found.mesh.place(rank)[1]),
                "measured_s": {kind: median(times[kind] for times in measured) for kind in measured[0]},
            }
        )
    # The ranks' processor time as a number of cores.
    share = sum(found.cpu) / sum(found.seconds)
    return {
        "scale": outcome.scale,
        "bytes_scale": outcome.bytes_scale,
        "link": {"latency_s": outcome.link.latency, "bytes_per_s": outcome.link.bandwidth},
        "iteration": {"predicted_s": found.predicted.makespan, "measured_s": list(found.seconds), "error": found.error},
        "bubble": {
            "predicted": found.predicted.bubble,
            "measured": median(timeline.bubble for timeline in found.measured),
        },
        "processor_share": share,
        "processor": {"cores": num_cores(), "rank_cores": share, "other_cores": outcome.others},
        "memory_bytes": outcome.size.memory,
        "planned": _planned(plan, profile, costs),
        "ranks": ranks,
    }


def _planned(plan: Plan, profile: Profile, costs: Costs) -> dict[str, float]:
    """The plan's predicted times without the rehearsal's scale: "iteration_s", "update_s" and "step_s", their sum."""
    iteration = simulate(plan.train, costs).makespan
    update = update_time(plan.train, plan.blocks, profile, plan.mesh)
    return {"iteration_s": iteration, "update_s": update, "step_s": iteration + update}


def print_report(console: Console, figures: dict[str, Any]) -> None:
    """Prints the figures of a rehearsal that `figures_of` gives.

    They are the iteration and the bubble, measured beside predicted, and each rank's times by kind of action.
    """
    planned, link, iteration = figures["planned"], figures["link"], figures["iteration"]
    times, bubble, processor = iteration["measured_s"], figures["bubble"], figures["processor"]
    update = f", then an update of {planned['update_s'] * 1e3:.1f} ms (not rehearsed)" if planned["update_s"] else ""
    others = processor["other_cores"]
    beside = "" if others is None else f", other programs {others:.2f}"
    spread = f"median of {len(times)}, {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}"
    waits, tensors = figures["scale"], figures["bytes_scale"]
    lines = (
        f"plan: an iteration of {planned['iteration_s'] * 1e3:.1f} ms{update}",
        f"scale: waits {waits:.4g} times as long as planned, tensors {tensors:.4g} times as large",
        f"link between ranks: {link['latency_s'] * 1e6:.0f} us latency, {link['bytes_per_s'] / 1e9:.2f} GB/s",
        f"cores in use: ranks {processor['rank_cores']:.2f}{beside}; there are {processor['cores']}",
        "",
        f"iteration: {median(times) * 1e3:.1f} ms measured ({spread})",
        f"           {iteration['predicted_s'] * 1e3:.1f} ms predicted: {iteration['error']:+.2%}",
        f"bubble: {bubble['measured']:.2%} measured, {bubble['predicted']:.2%} predicted",
        "",
    )
    console.print("\n".join(lines), soft_wrap=True)
    console.print(_rank_table(figures["ranks"]))


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    """A table with the milliseconds of each rank in each kind of action, measured and predicted.

    `ranks`: the figures "ranks" of `figures_of`.
    """
    # Kinds of work that no rank does are left out.
    kinds = [
        kind
        for kind in ranks[0]["predicted_s"]
        if any(rank[which][kind] for rank in ranks for which in ("predicted_s", "measured_s"))
    ]
    table = Table(box=None, pad_edge=False, title="ms: measured / predicted", title_justify="left")
    table.add_column("rank", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for rank in ranks:
        cells = (f"{rank['measured_s'][kind] * 1e3:.1f} / {rank['predicted_s'][kind] * 1e3:.1f}" for kind in kinds)
        table.add_row(str(rank["rank"]), *cells)
    return table

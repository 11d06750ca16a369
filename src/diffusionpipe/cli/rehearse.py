"""`diffusionpipe rehearse`: a plan run by real processes with virtual stages, beside its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diffusionpipe.cli.rehearsal import Rehearsed
    from diffusionpipe.costs import Costs, Link, Profile
    from diffusionpipe.ir import Mesh, Plan

RUN = "plan"


def rehearse(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.", show_default=False)],
    profile: Annotated[Path, typer.Option(metavar="FILE", help="The profile that the plan was made of.")],
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster that it was made for: speeds and gradient sums.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Factor of all waits; default: the shortest stage's becomes 10 ms.")
    ] = None,
    bytes_scale: Annotated[
        float | None,
        typer.Option(help="Factor of all tensors between stages; default: copying takes at most 5 % of a core."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes: whole data-parallel groups of the plan; default: all.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Measured iterations.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the prediction above a measured iteration.")] = None,
) -> None:
    """Run a plan on this machine with waits in place of compute: measured against predicted."""
    from json import dumps

    from rich.console import Console

    from diffusionpipe.cli.rehearsal import (
        fitting_bytes_scale,
        fitting_scale,
        measured_link,
        predict_run,
        rehearsal_mesh,
        rehearse_runs,
        virtual_run,
    )
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.runtime.local_ranks import local_ranks

    for name, value in (("--scale", scale), ("--bytes-scale", bytes_scale)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value} is no factor; use a positive number, e.g. 0.1")
    loaded, made = read_plan(plan), read_profile(profile)
    _require_sound(loaded, made, plan, profile)
    mesh = rehearsal_mesh(loaded.mesh, ranks)
    costs = _costs(loaded, made, cluster)
    scale = scale or fitting_scale(costs)
    with Console(stderr=True).status("starting the ranks") as status, local_ranks(mesh.num_ranks) as processes:
        link = measured_link(processes)
        sizes: dict[str, Any] = {"scale": scale, "link": link}
        bare = virtual_run(loaded.train, costs, made.graph, mesh, bytes_scale=1e-9, **sizes)
        iteration = predict_run(bare).makespan
        if bytes_scale is None:
            bytes_scale = fitting_bytes_scale(loaded.train, costs, link, iteration, data_parallel=mesh.data_parallel)
        status.update(f"rehearsing for about {iterations * iteration:.0f} s")
        run = virtual_run(loaded.train, costs, made.graph, mesh, bytes_scale=bytes_scale, **sizes)
        found = rehearse_runs(processes, {RUN: run}, [RUN] * iterations)[RUN]
    figures = _figures(found, link=link, scale=scale, bytes_scale=bytes_scale)
    figures["planned"] = _planned(loaded, made, costs)
    if json:
        typer.echo(dumps(figures, indent=2))
    else:
        _print_tables(Console(highlight=False), found, figures)
    if png:
        _draw(found, loaded, png, plan.stem)


def _require_sound(plan: Plan, profile: Profile, plan_file: Path, profile_file: Path) -> None:
    """Refuse a plan that is illegal or of another model."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.check import check

    check(plan.train)
    if plan.mesh.pipeline != plan.train.num_workers:
        raise ConfigError(
            f"{plan_file}: the mesh has {plan.mesh.pipeline} workers, the schedule orders for {plan.train.num_workers}"
        )
    missing = sorted({stage.weights for stage in plan.train.placement.stages} - set(range(len(plan.blocks))))
    if missing:
        raise ConfigError(f"{plan_file}: stages hold block {missing[0]}, the plan has {len(plan.blocks)} blocks")
    known = {layer.name for layer in profile.graph.layers}
    unknown = [name for block in plan.blocks for name in block if name not in known]
    if unknown:
        raise ConfigError(
            f"{profile_file} is of another model: it lacks {len(unknown)} of the plan's layers, e.g. {unknown[0]}; "
            "give the profile that the plan was made of"
        )


def _costs(plan: Plan, profile: Profile, cluster: str | None) -> Costs:
    """What the plan's actions cost, unscaled."""
    from dataclasses import replace

    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.planner.stage_costs import costs_of

    setting = setting_of(profile, plan.mesh, plan.batch)
    setting = replace(setting, workload=replace(setting.workload, checkpointed=plan.checkpointed))
    if cluster is not None:
        setting = replace(setting, cluster=load_cluster(cluster))
        if setting.cluster.num_ranks < plan.mesh.num_ranks:
            raise ConfigError(
                f"the plan is for {plan.mesh.num_ranks} ranks, cluster {setting.cluster.name} has "
                f"{setting.cluster.num_ranks}; give the cluster that it was made for"
            )
    return costs_of(plan.train, plan.blocks, plan.mesh, setting)


def _figures(found: Rehearsed, *, link: Link, scale: float, bytes_scale: float) -> dict[str, Any]:
    """Everything that is reported, in seconds."""
    from statistics import median

    from diffusionpipe.cli.rehearsal import seconds_by_kind

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
    return {
        "scale": scale,
        "bytes_scale": bytes_scale,
        "link": {"latency_s": link.latency, "bytes_per_s": link.bandwidth},
        "iteration": {"predicted_s": found.predicted.makespan, "measured_s": list(found.seconds), "error": found.error},
        "bubble": {
            "predicted": found.predicted.bubble,
            "measured": median(timeline.bubble for timeline in found.measured),
        },
        "processor_share": sum(found.cpu) / sum(found.seconds),
        "ranks": ranks,
    }


def _planned(plan: Plan, profile: Profile, costs: Costs) -> dict[str, float]:
    """What is predicted of the plan itself, unscaled, in seconds; the update is not rehearsed."""
    from diffusionpipe.planner.stage_costs import update_time
    from diffusionpipe.simulator import simulate

    iteration, update = (
        simulate(plan.train, costs).makespan,
        update_time(plan.train, plan.blocks, profile, plan.mesh),
    )
    return {"iteration_s": iteration, "update_s": update, "step_s": iteration + update}


def _print_tables(console: Any, found: Rehearsed, figures: dict[str, Any]) -> None:
    from statistics import median

    planned, link = figures["planned"], figures["link"]
    update = f" and an update of {planned['update_s'] * 1e3:.1f} ms" if planned["update_s"] else ""
    low, middle, high = min(found.seconds), median(found.seconds), max(found.seconds)
    bubble = figures["bubble"]
    console.print(
        f"planned: an iteration of {planned['iteration_s'] * 1e3:.1f} ms{update}; rehearsed is the iteration, scaled\n"
        f"iteration: {middle * 1e3:.1f} ms measured (median of {len(found.seconds)}, {low * 1e3:.1f} to "
        f"{high * 1e3:.1f}), {found.predicted.makespan * 1e3:.1f} ms predicted: {found.error:+.2%}\n"
        f"bubble: {bubble['measured']:.2%} measured, {bubble['predicted']:.2%} predicted\n"
        f"waits x {figures['scale']:.4g}, messages x {figures['bytes_scale']:.4g} on links of "
        f"{link['latency_s'] * 1e6:.0f} us and {link['bytes_per_s'] / 1e9:.2f} GB/s; "
        f"the ranks took {figures['processor_share']:.0%} of one core\n",
        soft_wrap=True,
    )
    console.print(_rank_table(figures["ranks"]))


def _rank_table(ranks: list[dict[str, Any]]) -> Any:
    """Milliseconds of each rank in each kind of action, measured and predicted."""
    from rich.table import Table

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


def _draw(found: Rehearsed, plan: Plan, png: Path, title: str) -> None:
    from diffusionpipe import viz
    from diffusionpipe.cli.rehearsal import group_of

    mesh: Mesh = found.mesh
    timelines = [("predicted", found.predicted), ("measured", group_of(found.typical, mesh))]
    viz.gantt(timelines, png, title=f"{title}, rehearsed", schedule=plan.train, axis=viz.MILLISECONDS)
    typer.echo(f"wrote {png}", err=True)

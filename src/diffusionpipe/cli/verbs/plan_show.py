"""`diffusionpipe plan show`: a plan's stages, memory and times, and a picture of one training iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.text.text_table import text_table
from diffusionpipe.cli.verbs.plan_options import UsedRanks

if TYPE_CHECKING:
    from diffusionpipe.ir import Plan
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.search.proposal import Proposal
    from diffusionpipe.units import Bytes
    from diffusionpipe.workflows.planning.times import PlanTimes

HEADS = ("stage", "rank", "ranks", "samples", "layers", "from", "to", "idle", "total", "free", "others")
"""Heads of the tables, each with its entry in docs/glossary.md; the others are parts of memory."""


def show(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.", show_default=False)],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Times and sizes of the layers. Default: profile.json beside the plan, as in a run folder; else the "
            "prediction that `plan --out` wrote; else all stages take equal time.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Devices and links: a cluster file or a known cluster. Needs --profile."),
    ] = None,
    use: UsedRanks = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="No effect: the summary is always printed.", hidden=True)
    ] = False,
) -> None:
    """Show a plan: its stages and their layers, memory, times, and one training iteration as a sketch."""
    from rich.console import Console

    from diffusionpipe import viz
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.plan_asking import ranks_named
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.timing.legal import check_plan
    from diffusionpipe.workflows.planning.times import found_times, given_times
    from diffusionpipe.workflows.training.run_timeline import timeline_title

    if (profile is None) != (cluster is None):
        raise ConfigError(
            "--profile and --cluster need each other; give both, or neither to use the files beside the plan"
        )
    if use is not None and cluster is None:
        raise ConfigError("--use names ranks of --cluster; give both, or leave out --use")
    used = ranks_named(use)
    check_outputs(perfetto, pictures=(png, svg))
    plan = read_plan(plan_file)
    check_plan(plan, source=plan_file)
    times = (
        given_times(plan, plan_file, profile, cluster, used)
        if profile and cluster
        else found_times(plan, plan_file, TERMINAL)
    )
    console = Console(highlight=False)
    for line in _lines(plan, times, max(72, console.width)):
        console.print(line, markup=False, soft_wrap=True)
    for path in (png, svg):
        if path:
            title = timeline_title(plan)
            viz.gantt([("", times.timeline)], path, title=title, schedule=plan.train, axis=times.axis)
    if perfetto:
        viz.perfetto(times.timeline, perfetto, schedule=plan.train)
    for path in (png, svg, perfetto):
        if path:
            typer.echo(f"wrote {path}", err=True)
    # Last, so that the plan is shown even if it does not fit.
    if times.proposal and times.setting and times.proposal.overflow > 0:
        raise ConfigError(_lacking(plan, times.setting, times.proposal))


def _lacking(plan: Plan, setting: Setting, proposal: Proposal) -> str:
    """A sentence that a plan does not fit the cluster, with the need of the rank that lacks most memory."""
    from diffusionpipe.workflows.training.plan_memory import lack_of

    needs = [use.total for use in proposal.memory]
    return (
        f"{lack_of(plan, needs, [device.memory for device in setting.cluster.devices])}; plan again for this cluster: "
        f"diffusionpipe plan --cluster {setting.cluster.name} --profile FILE --batch {plan.batch}"
    )


def _lines(plan: Plan, times: PlanTimes, width: int) -> Iterator[str]:
    from diffusionpipe import viz
    from diffusionpipe.planner.choosing.rows import unit_of
    from diffusionpipe.planner.search.naming import name_of_plan, sizes_of_plan, stages_of_plan

    ranks = plan.mesh.num_ranks
    heading = f"{name_of_plan(plan)}, {sizes_of_plan(plan)}; batch {plan.batch}, {ranks} rank{'s' * (ranks > 1)}"
    yield from wrap(heading, width, break_on_hyphens=False)
    more = f"; give {times.missing}" if times.missing else ""
    yield from wrap(f"times: {times.source}{more}", width, break_on_hyphens=False)
    yield from wrap(_durations(times), width, break_on_hyphens=False)
    yield ""
    yield from text_table(_stages(plan), width)
    yield from wrap(_frozen(plan), width, break_on_hyphens=False)
    if times.proposal and times.setting:
        yield ""
        unit = unit_of(max(use.total for use in times.proposal.memory))
        yield from wrap(f"memory of each rank at its peak, {unit[0]}, with {times.workload}:", width)
        # The most columns that fit; others are summed.
        for num_parts in range(len(times.proposal.memory[0].items()), 0, -1):
            table = list(text_table(_memory(plan, times.setting, times.proposal, unit[1], num_parts), width))
            if max(map(len, table)) <= width:
                break
        yield from table
    yield ""
    if plan.mesh.data_parallel > 1:
        which = "copies" if plan.mesh.pipeline == 1 else "groups"
        yield f"one iteration of the first of {plan.mesh.data_parallel} {which}, which all run the same schedule:"
    if any(len(one.blocks) > 1 for one in stages_of_plan(plan)):
        yield "the sketch counts each bucket as a stage:"
    yield from viz.explained_sketch(times.timeline, width=width, axis=times.axis).splitlines()


def _durations(times: PlanTimes) -> str:
    timeline = times.timeline
    bubble = f"bubble {timeline.bubble:.1%}"
    if times.axis.name != "ms":
        return f"iteration {timeline.makespan:g} units, {bubble}"
    proposal = times.proposal
    iteration = f"iteration {timeline.makespan * 1e3:.1f} ms"
    if proposal is None:
        return f"{iteration}, {bubble}"
    encoding = f"only encoding {proposal.exposed * 1e3:.1f} ms"
    if not proposal.update:
        return f"{iteration} (the profile has no update time), {bubble}, {encoding}"
    update = f"update {proposal.update * 1e3:.1f} ms"
    return f"step {proposal.step * 1e3:.1f} ms: {iteration}, then {update}; {bubble}, {encoding}"


def _stages(plan: Plan) -> list[Sequence[str]]:
    """Table rows, the head first: for each trained stage its rank in the first group, share of samples, and layers."""
    from diffusionpipe.planner.search.naming import stages_of_plan

    stages = stages_of_plan(plan)
    rows: list[Sequence[str]] = [("stage", "rank", "samples", "layers", "from", "to")]
    for number, stage in enumerate(stages):
        names = [name for block in stage.blocks for name in plan.blocks[block]]
        buckets = f" in {len(stage.blocks)} buckets" if len(stage.blocks) > 1 else ""
        rank = str(plan.mesh.rank(0, stage.worker))
        rows.append((str(number), rank, stage.share or "all", f"{len(names)}{buckets}", names[0], names[-1]))
    return rows


def _frozen(plan: Plan) -> str:
    """The frozen part in one line: its layers, the ranks that encode, when they do, and where its weights are kept."""
    from diffusionpipe.holding.storage import storage_of
    from diffusionpipe.ir import Op

    placement = plan.train.placement
    encoders = [p for p in placement.pipelines if Op.ENCODE in p.ops]
    if not encoders or not plan.blocks[-1]:
        return "frozen: no layers"
    workers = sorted({placement.stages[stage].worker for p in encoders for stage in p.stages})
    every = len(workers) == plan.mesh.pipeline
    where = "every rank" if every else f"rank {', '.join(str(plan.mesh.rank(0, worker)) for worker in workers)}"
    when = (
        "the next batch, in pipeline bubbles"
        if any(p.is_ahead for p in encoders)
        else "each batch before its first forward"
    )
    rest = "; their weights are kept in host memory" if storage_of(plan.encoders).brings else ""
    components = dict.fromkeys(fill.component for fill in plan.train.fills if fill.component)
    names = f" ({', '.join(components)})" if components else ""
    count = len(plan.blocks[-1])
    return f"frozen: {count} layer{'s' * (count > 1)}{names} on {where}; encoded: {when}{rest}"


def _memory(plan: Plan, setting: Setting, proposal: Proposal, unit: Bytes, num_parts: int) -> list[Sequence[str]]:
    """Table rows, the head first: each worker's idle time, largest `num_parts` of its memory, total and free memory."""
    from diffusionpipe.planner.choosing.rows import parts_of
    from diffusionpipe.planner.from_profile import UNKNOWN_MEMORY

    parts = [parts_of(use, unit) for use in proposal.memory]
    largest = {name: max(one.get(name, 0.0) for one in parts) for name in {name: 0 for one in parts for name in one}}
    names = sorted(largest, key=lambda name: -largest[name])
    shown, rest = names[:num_parts], names[num_parts:]
    is_known = all(device.memory < UNKNOWN_MEMORY for device in setting.cluster.devices)
    head = ["ranks" if plan.mesh.data_parallel > 1 else "rank", "idle", *shown, *(["others"] if rest else []), "total"]
    rows: list[Sequence[str]] = [(*head, "free") if is_known else head]
    for worker, (own, use) in enumerate(zip(parts, proposal.memory, strict=True)):
        ranks = [plan.mesh.rank(group, worker) for group in range(plan.mesh.data_parallel)]
        idle = 1 - proposal.timeline.busy(worker) / (proposal.timeline.makespan or 1)
        figures = [own.get(name, 0.0) for name in shown]
        figures += [sum(own.get(name, 0.0) for name in rest)] if rest else []
        free = min(setting.cluster.devices[rank].memory for rank in ranks) - use.total
        figures += [use.total / unit, *([free / unit] if is_known else [])]
        rows.append((_ranks(ranks), f"{idle:.1%}", *(f"{figure:.2f}" for figure in figures)))
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks as text: "0, 2, 4", or of more than three "0, 2, ... 30"."""
    return ", ".join(map(str, ranks)) if len(ranks) < 4 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"

"""`diffusionpipe plan show`: a plan's stages, memory and times, and a picture of one training iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.text.text_table import text_table
from diffusionpipe.cli.verbs.plan_options import UsedRanks

if TYPE_CHECKING:
    from diffusionpipe import viz
    from diffusionpipe.costs import ModelGraph, Profile
    from diffusionpipe.ir import Plan, Timeline
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.search.proposal import Proposal
    from diffusionpipe.units import Bytes

HEADS = ("stage", "rank", "ranks", "samples", "layers", "from", "to", "idle", "total", "free", "others")
"""Heads of the tables, each with its entry in docs/glossary.md; the others are parts of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The timeline of a plan, and the origin of its times."""

    source: str
    timeline: Timeline
    axis: viz.TimeAxis
    setting: Setting | None = None
    proposal: Proposal | None = None
    """The plan's simulation with its update and memory; None where no profile is known."""
    workload: str = ""
    """The assumptions about the training besides the model."""


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
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.timing.legal import check_plan
    from diffusionpipe.workflows.run_timeline import timeline_title

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
    times = _given(plan, plan_file, profile, cluster, used) if profile and cluster else _found(plan, plan_file)
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
    if times.proposal and times.setting and times.proposal.overflow > 0:
        raise ConfigError(_lacking(plan, times.setting, times.proposal))


def _lacking(plan: Plan, setting: Setting, proposal: Proposal) -> str:
    """That a plan does not fit, with what the rank needs that lacks most."""
    from diffusionpipe.cli.text.plan_memory import lack_of

    needs = [use.total for use in proposal.memory]
    return (
        f"{lack_of(plan, needs, [device.memory for device in setting.cluster.devices])}; plan again for this cluster: "
        f"diffusionpipe plan --cluster {setting.cluster.name} --profile FILE --batch {plan.batch}"
    )


def _given(plan: Plan, plan_file: Path, profile: Path, cluster: str, used: Sequence[int]) -> _Times:
    """The times of the plan with a profile and a cluster that the user names."""
    from diffusionpipe.costs.clusters import check_ranks, load_cluster
    from diffusionpipe.costs.files import check_device, read_profile
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.stated_setting import stated_setting
    from diffusionpipe.workflows.used_devices import used_of

    loaded, machines = read_profile(profile), load_cluster(cluster)
    check_device(loaded, machines, source=str(profile))
    _check_kept(plan, loaded, profile)
    machines = used_of(machines, used, source="--use")
    check_ranks(machines, plan.mesh.num_ranks, source=str(plan_file))
    setting = stated_setting(
        loaded, machines, plan.batch, checkpoint=plan.checkpointed, has_ema=False, optimizer="AdamW"
    )
    if misfit := _misfit(plan, setting.graph):
        raise ConfigError(
            f"{profile} was made for another model: {misfit}; give the profile from which the plan was made"
        )
    return _predicted(plan, setting, f"simulated with {profile} and {cluster}", "AdamW without a moving average")


def _check_kept(plan: Plan, profile: Profile, path: Path) -> None:
    from diffusionpipe.costs.files import check_kept

    if plan.train.splits_backwards:
        check_kept(profile, source=str(path))


def _predicted(plan: Plan, setting: Setting, source: str, workload: str) -> _Times:
    from diffusionpipe import viz
    from diffusionpipe.planner.pricing.storing import stored_as
    from diffusionpipe.planner.search.proposal import predict

    setting = stored_as(setting, plan.encoders)
    proposal = predict(setting, plan.train, plan.blocks, plan.mesh)
    return _Times(
        source=source,
        timeline=proposal.timeline,
        axis=viz.MILLISECONDS,
        setting=setting,
        proposal=proposal,
        workload=workload,
    )


def _found(plan: Plan, plan_file: Path) -> _Times:
    """The times of the plan with the files beside it; without any, in equal units."""
    from diffusionpipe import viz
    from diffusionpipe.simulator import simulate, uniform_costs
    from diffusionpipe.workflows.prediction_file import read_prediction

    beside = _setting_beside(plan, plan_file)
    if beside is not None:
        setting, files, workload = beside
        return _predicted(plan, setting, f"simulated with {files} beside the plan", workload)
    predicted = read_prediction(plan_file, plan)
    if predicted is not None:
        source = "the prediction beside the plan; give --profile and --cluster for memory and update"
        return _Times(source=source, timeline=predicted, axis=viz.MILLISECONDS)
    source = "no profile: times are equal units (forward 1, backward 2, encoding 1); give --profile and --cluster"
    return _Times(source=source, timeline=simulate(plan.train, uniform_costs(plan.train)), axis=viz.UNITS)


def _setting_beside(plan: Plan, plan_file: Path) -> tuple[Setting, str, str] | None:
    """The setting of the plan's run, the names of its files, and its training in words; None without a profile."""
    from dataclasses import replace

    from diffusionpipe.costs.clusters import check_ranks, load_cluster
    from diffusionpipe.costs.files import check_device, read_profile
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.workflows.stated_setting import stated_setting

    profile, cluster, recipe = (plan_file.with_name(name) for name in ("profile.json", "cluster.json", "recipe.toml"))
    if not profile.is_file():
        return None
    loaded, files = read_profile(profile), ["profile.json"]
    if _misfit(plan, loaded.graph):
        typer.echo(f"note: {profile} was made for another model and is not used", err=True)
        return None
    found = setting_of(loaded, plan.mesh, plan.batch, checkpointed=plan.checkpointed).cluster
    if cluster.is_file():
        found = load_cluster(str(cluster))
        files.append("cluster.json")
        check_ranks(found, plan.mesh.num_ranks, source=str(plan_file))
    check_device(loaded, found, source=str(profile))
    _check_kept(plan, loaded, profile)
    setting = stated_setting(loaded, found, plan.batch, checkpoint=plan.checkpointed, has_ema=False, optimizer="AdamW")
    training = "AdamW without a moving average"
    if recipe.is_file():
        from diffusionpipe.holding import DEVICE
        from diffusionpipe.trainer.model.workload import workload_of
        from diffusionpipe.trainer.recipe import recorded_recipe

        workload = workload_of(recorded_recipe(recipe), loaded.graph)
        workload = replace(workload, checkpointed=plan.checkpointed, encoders=DEVICE)
        setting, training = replace(setting, workload=workload), "the recipe's training"
        files.append("recipe.toml")
    return setting, " and ".join([", ".join(files[:-1]), files[-1]] if files[1:] else files), training


def _misfit(plan: Plan, graph: ModelGraph) -> str | None:
    """Why the layers of a plan's stages differ from a model's, in its order; None where they do not."""
    known = {layer.name for layer in graph.layers}
    if unknown := [name for block in plan.blocks for name in block if name not in known]:
        return f"it lacks {len(unknown)} of the plan's layers, e.g. {unknown[0]}"
    order = graph.backbone_layers
    for block in plan.blocks:
        trained = [name for name in block if name in order]
        first = order.index(trained[0]) if trained else 0
        if order[first : first + len(trained)] != tuple(trained):
            return f"its layers from {trained[0]} on come in another order than the plan's"
    return None


def _lines(plan: Plan, times: _Times, width: int) -> Iterator[str]:
    from diffusionpipe import viz
    from diffusionpipe.planner.rows import unit_of
    from diffusionpipe.planner.search.naming import name_of_plan, sizes_of_plan, stages_of_plan

    ranks = plan.mesh.num_ranks
    heading = f"{name_of_plan(plan)}, {sizes_of_plan(plan)}; batch {plan.batch}, {ranks} rank{'s' * (ranks > 1)}"
    yield from wrap(heading, width, break_on_hyphens=False)
    yield from wrap(f"times: {times.source}", width, break_on_hyphens=False)
    yield from wrap(_durations(times), width, break_on_hyphens=False)
    yield ""
    yield from text_table(_stages(plan), width)
    yield from wrap(_frozen(plan), width, break_on_hyphens=False)
    if times.proposal and times.setting:
        yield ""
        unit = unit_of(max(use.total for use in times.proposal.memory))
        yield from wrap(f"memory of each rank at its peak, {unit[0]}, with {times.workload}:", width)
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


def _durations(times: _Times) -> str:
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
    """A row for each trained stage: its rank in the first group, its layers, its samples of a micro-batch."""
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
    """The frozen part in one line: its layers, the ranks that encode, when they do, and where the weights rest."""
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
    """A row for each worker: idle time, the largest `num_parts` of its memory, their sum, and the free memory."""
    from diffusionpipe.planner.from_profile import UNKNOWN_MEMORY
    from diffusionpipe.planner.rows import parts_of

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
    """E.g. "0, 2, 4, 6", or "0, 2, ... 30"."""
    return ", ".join(map(str, ranks)) if len(ranks) < 4 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"

"""`diffusionpipe rehearse`: a plan run by real processes with virtual stages, beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusionpipe.cli.verbs.plan_options import UsedRanks

if TYPE_CHECKING:
    from rich.console import Console

    from diffusionpipe.cli.text.rehearsal_report import Outcome
    from diffusionpipe.costs import Costs, Profile
    from diffusionpipe.ir import Mesh, Plan
    from diffusionpipe.runtime.machine.machine_use import Counters
    from diffusionpipe.units import Seconds
    from diffusionpipe.workflows.rehearsing.rehearsal import Rehearsed
    from diffusionpipe.workflows.rehearsing.size import Size

RUN = "plan"
BUSY = 0.25
"""The fraction of all cores that other programs may use; above it, measured times are not to be trusted."""
CROWDED = 0.5
"""The fraction of all cores that the ranks may use; above it, measured times are not to be trusted."""
LINES_EVERY = 5.0
"""Seconds between two lines of progress where no bar can be drawn."""


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.", show_default=False)]
ProfileOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The profile from which the plan was made.")]
ClusterOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The cluster for which the plan was made: device speeds and links."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The model of the plan, in place of --profile, as it was given to `plan`."),
]
ResolutionOption = Annotated[
    str | None, typer.Option(metavar="SIDE", help="With --model: size of a picture or clip, as for `plan`.")
]
ScaleOption = Annotated[
    float | None,
    typer.Option(
        help="Factor for all waits; default: the shortest stage waits 10 ms, but the whole rehearsal takes at "
        "most 20 s."
    ),
]
BytesScaleOption = Annotated[
    float | None,
    typer.Option(
        help="Factor for the sizes of all tensors between stages; default: copying takes at most 5 % of a core, and "
        "tensors take at most half of the free memory."
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes to start: the ranks of one copy of the pipeline, or more copies; default: all.",
    ),
]
IterationsOption = Annotated[int, typer.Option(min=1, max=1_000_000, help="Measured iterations.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
PngOption = Annotated[Path | None, typer.Option(help="Draw the prediction above a measured iteration.")]


def rehearse(
    plan: PlanArgument,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    scale: ScaleOption = None,
    bytes_scale: BytesScaleOption = None,
    ranks: RanksOption = None,
    iterations: IterationsOption = 10,
    json: JsonOption = False,
    png: PngOption = None,
    model: ModelOption = None,
    resolution: ResolutionOption = None,
    use: UsedRanks = None,
) -> None:
    """Run a plan on this machine with waits in place of compute, and compare measured and predicted times."""
    from json import dumps

    from rich.console import Console

    from diffusionpipe.cli.text.rehearsal_report import figures_of, print_report
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.runtime.machine.free_memory import free_memory
    from diffusionpipe.runtime.machine.machine_use import own_cores, read_counters
    from diffusionpipe.workflows.planning.origin import options_of, overrides_of
    from diffusionpipe.workflows.rehearsing.rehearsal import fitting_scale, rehearsal_mesh
    from diffusionpipe.workflows.rehearsing.size import size_of

    # From here on, so that the warning covers the loading too.
    began = read_counters(own_cores())
    _check_scales({"--scale": scale, "--bytes-scale": bytes_scale})
    check_outputs(pictures=(png,))
    loaded = read_plan(plan)
    # A plan's file says with which options it was made.
    origin = options_of(loaded.made_with) if profile is None and model is None else {}
    profile = Path(origin["profile"]) if "profile" in origin else profile
    # Ranks of the plan's own cluster mean nothing on another one.
    cluster, use = cluster or origin.get("cluster"), use or (None if cluster else origin.get("use"))
    if "recipe" in origin and profile is None:
        made = _profile_of_recipe(Path(origin["recipe"]), overrides_of(loaded.made_with), cluster)
    else:
        made = _profile(profile, model, resolution, cluster, origin)
    _require_sound(loaded, made, plan, str(profile or model or origin.get("model") or origin.get("recipe")))
    mesh = rehearsal_mesh(loaded.mesh, ranks)
    costs = _costs(loaded, made, cluster, use)
    scale = scale or fitting_scale(loaded.train, costs, iterations)
    size = size_of(
        loaded.train,
        costs,
        made.graph,
        mesh,
        iterations=iterations,
        scale=scale,
        bytes_scale=bytes_scale,
        free=free_memory(),
    )
    errors = Console(stderr=True, highlight=False)
    _say(errors, str(size))
    _warn_if_busy(errors, began)
    found = _rehearsed(errors, loaded, costs, made, size, mesh=mesh, scale=scale, is_given=bytes_scale is not None)
    figures = figures_of(found, loaded, made, costs)
    if json:
        typer.echo(dumps(figures, indent=2))
    else:
        print_report(Console(highlight=False), figures)
    if warning := disturbance(figures["processor"]):
        _say(errors, f"[yellow]warning:[/] {warning}")
    if png:
        _draw(found.result, loaded, png, plan.stem)


def _check_scales(scales: Mapping[str, float | None]) -> None:
    from diffusionpipe.errors import ConfigError

    for name, value in scales.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value} is not a positive number; use e.g. 0.1")


def _profile_of_recipe(recipe: Path, overrides: Sequence[str], cluster: str | None) -> Profile:
    """The profile of the layers of the recipe from which the plan was made.

    `cluster`: the name or file of the cluster; None for the cluster that the recipe names.
    """
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.workflows.planning.recipe_profile import profile_of_file

    return profile_of_file(recipe, overrides, cluster, tell=TERMINAL)


def _profile(
    file: Path | None, model: str | None, resolution: str | None, cluster: str | None, origin: Mapping[str, str]
) -> Profile:
    """The profile that `file` holds, or without a file a computed profile of the model on the cluster's device.

    `origin`: option of `plan`, without its dashes -> the value with which the plan was made; it fills in for None.

    Raises:
        ConfigError: there is no file, and no model or no cluster.
    """
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.planning.stated_model import named_model, profile_of

    rank, chunks = origin.get("lora-rank"), origin.get("caption-chunks")
    stated = named_model(
        model or origin.get("model"),
        file,
        kind=origin.get("model-class"),
        resolution=resolution or origin.get("resolution"),
        lora_rank=int(rank) if rank is not None and rank.isdecimal() else None,
        frozen_dtype=origin.get("frozen-dtype"),
        weights=origin.get("weights"),
        caption_chunks=int(chunks) if chunks is not None and chunks.isdecimal() else None,
    )
    if file is not None:
        return read_profile(file)
    if stated is None or cluster is None:
        raise ConfigError("give --profile, or --model and --cluster as they were given to `plan`")
    return profile_of(stated, load_cluster(cluster), tell=TERMINAL)


def _rehearsed(
    errors: Console, plan: Plan, costs: Costs, profile: Profile, size: Size, *, mesh: Mesh, scale: float, is_given: bool
) -> Outcome:
    """The outcome of a rehearsal: starts the ranks, measures the link between them, and lets them run the plan.

    `scale`: factor from the plan's times to the waits; `is_given`: the user has set the factor of sizes, so the
    measured link does not lower it.
    """
    from diffusionpipe.cli.text.rehearsal_report import Outcome
    from diffusionpipe.runtime.job.local_ranks import local_ranks
    from diffusionpipe.runtime.machine.machine_use import own_cores, read_counters
    from diffusionpipe.workflows.rehearsing.rehearsal import (
        fitting_bytes_scale,
        measured_link,
        rehearse_runs,
        virtual_run,
    )

    counters = []
    with local_ranks(mesh.num_ranks) as processes:
        with errors.status("starting the ranks"):
            link = measured_link(processes)
        bytes_scale = size.bytes_scale
        # The link is measured by now, so the size can be chosen again, and only smaller.
        if not is_given:
            fitting = fitting_bytes_scale(plan.train, costs, link, size.iteration, data_parallel=mesh.data_parallel)
            bytes_scale = min(bytes_scale, fitting)
        run = virtual_run(plan.train, costs, profile.graph, mesh, scale=scale, bytes_scale=bytes_scale, link=link)
        with rehearsal_progress(errors, size) as report:

            def note(done: int) -> None:
                counters.append(read_counters(own_cores()))
                report(done)

            found = rehearse_runs(processes, {RUN: run}, [RUN] * size.iterations, note)[RUN]
    others = used_by_others(counters[0], counters[-1])
    return Outcome(result=found, size=size, link=link, scale=scale, bytes_scale=bytes_scale, others=others)


@contextmanager
def rehearsal_progress(
    console: Console, size: Size, *, clock: Callable[[], Seconds] = perf_counter
) -> Iterator[Callable[[int], None]]:
    """A context with a function (measured iterations) that shows them: a bar on a terminal, else a line now and then.

    One iteration, the warm-up, runs before the measured ones.
    """
    from diffusionpipe.cli.text.screen import ConsoleScreen

    said, total = clock(), size.iterations + 1

    def note(done: int) -> None:
        nonlocal said
        if console.is_terminal:
            # The warm-up counts for the bar, because it takes as long.
            work.show(done + 1, total, {"iteration": f"{done + 1}/{total}"})
            return
        now, left = clock(), size.iterations - done
        if done and (now - said >= LINES_EVERY or (not left and size.seconds >= LINES_EVERY)):
            seconds = f"about {left * size.iteration:.0f} s left" if left else "done"
            console.print(f"rehearsed {done} of {size.iterations} iterations, {seconds}", soft_wrap=True)
            said = now

    with ConsoleScreen(console, speaks=console.is_terminal).work("rehearsing", is_timed=True) as work:
        yield note


def _warn_if_busy(errors: Console, began: Counters | None) -> None:
    """Print a warning if other programs have used more than `BUSY` of the cores since the counters `began`."""
    from diffusionpipe.runtime.machine.cores import num_cores
    from diffusionpipe.runtime.machine.machine_use import own_cores, read_counters

    others, cores = used_by_others(began, read_counters(own_cores())), num_cores()
    if others is not None and others > BUSY * cores:
        _say(
            errors,
            f"[yellow]warning:[/] other programs use {others:.1f} of this machine's {cores} cores now; ranks that "
            "share their cores wake up late, and measured times get longer",
        )


def used_by_others(begin: Counters | None, end: Counters | None) -> float | None:
    """The number of cores that other programs kept busy, on average, between two readings of the machine's counters.

    None where it is unknown.
    """
    from diffusionpipe.runtime.machine.machine_use import StepCounters, other_cpu_load, own_cores

    if begin is None or end is None or end.clock <= begin.clock:
        return None
    return other_cpu_load(len(own_cores()), [StepCounters(begin, end)])


def _say(console: Console, text: str) -> None:
    """Print a message on the console; only on a terminal are its lines broken, between words."""
    console.print(text, soft_wrap=not console.is_terminal)


def disturbance(processor: dict[str, Any]) -> str | None:
    """A sentence on the cause that made the measured times too long, other programs or too many ranks.

    None without one. `processor`: "other_cores", "rank_cores" and "cores", numbers of cores.
    """
    others, ranks, cores = processor["other_cores"], processor["rank_cores"], processor["cores"]
    if others is not None and others > BUSY * cores:
        return (
            f"other programs used {others:.1f} of this machine's {cores} cores meanwhile, so the measured times are "
            "too long; rehearse again when it is idle"
        )
    if ranks > CROWDED * cores:
        return (
            f"the ranks used {ranks:.1f} of this machine's {cores} cores, so they delayed each other; use a larger "
            "--scale, a smaller --bytes-scale, or fewer --ranks"
        )
    return None


def _require_sound(plan: Plan, profile: Profile, plan_file: Path, source: str) -> None:
    """Refuse a plan that is illegal, or that has layers which the profile lacks; `source`: the profile's name.

    Raises:
        ConfigError: the profile lacks some of the plan's layers.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.timing.legal import check_plan

    check_plan(plan, source=plan_file)
    known = {layer.name for layer in profile.graph.layers}
    unknown = [name for block in plan.blocks for name in block if name not in known]
    if unknown:
        raise ConfigError(
            f"{source} was made for another model than {plan_file}: it lacks {len(unknown)} of the plan's "
            f"layers, e.g. {unknown[0]}; give the profile from which the plan was made"
        )


def _costs(plan: Plan, profile: Profile, cluster: str | None, use: str | None) -> Costs:
    """The costs of the training schedule's actions, as the profile and the cluster give them, without a scale.

    `cluster`: its name or file; None for one machine with the profile's links. `use`: the ranks of it that the plan
    has, as text.
    """
    from dataclasses import replace

    from diffusionpipe.cli.verbs.plan_asking import ranks_named
    from diffusionpipe.costs.clusters import check_ranks, load_cluster
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.planner.pricing.stage_costs import costs_of
    from diffusionpipe.workflows.planning.used_devices import used_of

    if use is not None and cluster is None:
        raise ConfigError("--use names ranks of --cluster; give both, or leave out --use")
    setting = setting_of(profile, plan.mesh, plan.batch)
    setting = replace(setting, workload=replace(setting.workload, checkpointed=plan.checkpointed))
    if cluster is not None:
        setting = replace(setting, cluster=used_of(load_cluster(cluster), ranks_named(use), source="--use"))
        check_ranks(setting.cluster, plan.mesh.num_ranks, source="the plan")
    return costs_of(plan.train, plan.blocks, plan.mesh, setting)


def _draw(found: Rehearsed, plan: Plan, png: Path, title: str) -> None:
    from diffusionpipe import viz
    from diffusionpipe.workflows.rehearsing.rehearsal import group_of

    mesh: Mesh = found.mesh
    timelines = [("predicted", found.predicted), ("measured", group_of(found.typical, mesh))]
    viz.gantt(timelines, png, title=f"{title}, rehearsed", schedule=plan.train, axis=viz.MILLISECONDS)
    typer.echo(f"wrote {png}", err=True)

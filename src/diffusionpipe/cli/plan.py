"""`diffusionpipe plan`: the best way to train a recipe or a profiled model on a cluster, and pictures of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.default_verb import DEFAULT, DefaultVerb

if TYPE_CHECKING:
    from rich.console import Console

    from diffusionpipe.costs import Cluster
    from diffusionpipe.planner.explain import Comparison, Row
    from diffusionpipe.planner.stage_costs import Setting

GIB = 2**30

app = typer.Typer(cls=DefaultVerb, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def plan() -> None:
    """Find the fastest way to train on a cluster that fits in memory."""


@app.command(DEFAULT, epilog="[bold]diffusionpipe plan show PLAN[/bold] draws a plan.")
def make(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="The recipe to plan for. Without one, --profile and --batch say what is trained."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: key.path=value.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A cluster file, or a shipped one, e.g. a100-80x8:4 for four such nodes; default: pipeline.cluster.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What `diffusionpipe profile` wrote. With a recipe it may be left out: then layers are computed for a "
            "known device or measured on this machine, once, and kept in $XDG_CACHE_HOME/diffusionpipe/profiles "
            "(~/.cache if that is not set).",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one step over all devices; default: the recipe's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan file, which pipeline.plan takes, and its prediction.")
    ] = None,
    fill: Annotated[
        bool | None,
        typer.Option(
            help="Encode the next batch in the bubbles of this one, or this one first; default: as the recipe says, "
            "else whatever is faster."
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layers to recompute in the backward, e.g. '*'. Not with a recipe."),
    ] = None,
    ema: Annotated[
        bool, typer.Option(help="Keep a moving average of the trained parameters. Not with a recipe.")
    ] = False,
    optimizer: Annotated[
        str | None, typer.Option(help="AdamW, SGD, ... of torch.optim; default AdamW. Not with a recipe.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep profiles that are made here, and use kept ones.")] = True,
) -> None:
    """Find the fastest way to train that fits in memory, and say why it is."""
    from rich.console import Console

    from diffusionpipe.planner.choice import choose

    _check_options(recipe, {"--checkpoint": checkpoint, "--ema": ema, "--optimizer": optimizer}, profile, batch)
    sample_batch = 0
    if recipe is None:
        chosen = _cluster(cluster, None)
        assert profile is not None
        assert batch is not None
        setting = _setting(
            profile, chosen, batch, checkpoint=tuple(checkpoint or ()), has_ema=ema, optimizer=optimizer or "AdamW"
        )
    else:
        from diffusionpipe.cli.recipe_profile import make_profile_of, read_profile_of
        from diffusionpipe.cli.recipe_setting import check_search, setting_of
        from diffusionpipe.trainer.recipe_file import load_recipe
        from diffusionpipe.trainer.workload import samples_drawn_together

        loaded = load_recipe(recipe, [*(overrides or ()), *([f"training.batch={batch}"] if batch else [])])
        chosen = _cluster(cluster, loaded.pipeline.cluster)
        check_search(loaded, chosen.num_ranks)
        found = (
            read_profile_of(loaded, chosen, profile) if profile else make_profile_of(loaded, chosen, uses_cache=cache)
        )
        setting = setting_of(loaded, found, chosen)
        fill = fill if fill is not None else loaded.pipeline.fill
        sample_batch = samples_drawn_together(loaded)
    choice = choose(setting, fill=fill)
    _print_comparison(Console(highlight=False), setting, choice.comparison())
    if out:
        from diffusionpipe.cli.prediction_file import write_prediction
        from diffusionpipe.ir.files import write_plan

        write_plan(choice.plan(sample_batch=sample_batch), out)
        beside = write_prediction(choice.proposal.timeline, out)
        typer.echo(f"wrote {out} and its predicted timeline, {beside.name}", err=True)


def _check_options(recipe: Path | None, stated: dict[str, object], profile: Path | None, batch: int | None) -> None:
    """Refuse options that the recipe states, and a lack of those that it would."""
    from diffusionpipe.errors import ConfigError

    wrong = [name for name, value in stated.items() if value]
    if recipe is not None and wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: the recipe says it; change the recipe, or a key of it by key.path=value"
        )
    missing = [name for name, value in (("--profile", profile), ("--batch", batch)) if value is None]
    if recipe is None and missing:
        raise ConfigError(
            f"there is no recipe and no {' and no '.join(missing)}; give a recipe, or --profile and --batch"
        )


def _cluster(name: str | None, of_recipe: str | None) -> Cluster:
    from diffusionpipe.costs.clusters import load_cluster, shipped_clusters
    from diffusionpipe.errors import ConfigError

    if name is None and of_recipe is None:
        raise ConfigError(f"--cluster: say what to plan for, a cluster file or one of {', '.join(shipped_clusters())}")
    return load_cluster(name or str(of_recipe))


@app.command("show")
def show(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.", show_default=False)],
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times; without it those of the file beside it, or all alike."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="Devices and links; goes with --profile.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print a sketch; so does giving no other option.")] = False,
) -> None:
    """Draw one training iteration of a plan, as `plan --out` predicted it or simulated with the given times."""
    from diffusionpipe import viz
    from diffusionpipe.cli.prediction_file import read_prediction
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.check import check
    from diffusionpipe.ir.files import read_plan
    from diffusionpipe.planner.proposal import predict
    from diffusionpipe.simulator import simulate, uniform_costs

    if (profile is None) != (cluster is None):
        raise ConfigError("--profile and --cluster go together; give both, or none for stages that are alike")
    loaded = read_plan(plan_file)
    check(loaded.train)
    if profile and cluster:
        setting = _setting(
            profile,
            _cluster(cluster, None),
            loaded.batch,
            checkpoint=loaded.checkpointed,
            has_ema=False,
            optimizer="AdamW",
        )
        _require_layers(setting, [name for block in loaded.blocks for name in block], profile)
        found = predict(setting, loaded.train, loaded.blocks, loaded.mesh)
        timeline, axis = found.timeline, viz.MILLISECONDS
        if found.update:
            typer.echo(
                f"step {found.step * 1e3:.1f} ms: iteration {found.iteration * 1e3:.1f} ms, then update "
                f"{found.update * 1e3:.1f} ms"
            )
    elif (predicted := read_prediction(plan_file, loaded)) is not None:
        timeline, axis = predicted, viz.MILLISECONDS
    else:
        timeline, axis = simulate(loaded.train, uniform_costs(loaded.train)), viz.UNITS
    for path in (png, svg):
        if path:
            viz.gantt([("", timeline)], path, title=plan_file.stem, schedule=loaded.train, axis=axis)
    if perfetto:
        viz.perfetto(timeline, perfetto, schedule=loaded.train)
    for path in (png, svg, perfetto):
        if path:
            typer.echo(f"wrote {path}", err=True)
    if text or not any((png, svg, perfetto)):
        typer.echo(viz.sketch(timeline))


def _setting(
    profile: Path, cluster: Cluster, batch: int, *, checkpoint: tuple[str, ...], has_ema: bool, optimizer: str
) -> Setting:
    """A training that is stated on the command line; parameters are as wide as the profile has them."""
    from diffusionpipe.costs import Workload
    from diffusionpipe.costs.files import check_device, read_profile
    from diffusionpipe.costs.workload import state_of_optimizer
    from diffusionpipe.planner.stage_costs import Setting

    loaded = read_profile(profile)
    check_device(loaded, cluster, source=str(profile))
    width = 8 if loaded.precision == "float64" else 4
    workload = Workload(
        batch=batch,
        parameter_bytes=width,
        gradient_bytes=width,
        optimizer_bytes=width * state_of_optimizer(optimizer),
        ema_bytes=width if has_ema else 0,
        checkpointed=checkpoint,
    )
    return Setting(profile=loaded, cluster=cluster, workload=workload)


def _require_layers(setting: Setting, names: list[str], profile: Path) -> None:
    from diffusionpipe.errors import ConfigError

    known = {layer.name for layer in setting.graph.layers}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{profile} is of another model: it lacks {len(unknown)} of the plan's layers, e.g. {unknown[0]}; give "
            "the profile that the plan was made of"
        )


def _print_comparison(console: Console, setting: Setting, comparison: Comparison) -> None:
    from rich.table import Table

    heading = f"batch {setting.workload.batch} on {setting.cluster.name}, {setting.cluster.num_ranks} devices"
    table = Table(box=None, pad_edge=False, header_style="bold", title=heading, title_justify="left")
    table.add_column("", overflow="fold", min_width=11)
    table.add_column("layout", overflow="fold", min_width=15)
    knows_update = setting.profile.update > 0
    update = ("update\nms",) if knows_update else ()
    for name in ("step\nms", *update, "samples\n/s", "\nidle", "only en-\ncoding", "peak\nGiB", "too\nmuch"):
        table.add_column(name, justify="right", no_wrap=True)
    for rows, style in ((comparison.ours, ""), (comparison.others, "dim")):
        for index, row in enumerate(rows):
            is_winner = rows is comparison.ours and index == 0
            table.add_row(*_cells(row, knows_update=knows_update), style="bold green" if is_winner else style)
        table.add_section()
    console.print(table)
    meaning = "an iteration and the update after it" if knows_update else "an iteration; the profile knows no update"
    console.print(f"\nstep: {meaning}", soft_wrap=True)
    use = comparison.ours[0].use
    if use:
        items = [f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in use.items().items() if size]
        console.print(f"\nfullest device, GiB: {', '.join(items)}", soft_wrap=True)
    console.print(f"\n{comparison.verdict}", soft_wrap=True)


def _cells(row: Row, *, knows_update: bool) -> tuple[str, ...]:
    return (
        row.name,
        row.sizes,
        f"{row.step * 1e3:.1f}",
        *((f"{row.update * 1e3:.1f}",) if knows_update else ()),
        f"{row.samples_per_second:.4g}",
        f"{row.bubble:.1%}",
        f"{row.exposed * 1e3:.1f}",
        f"{row.memory / GIB:.1f}",
        f"{row.overflow / GIB:.1f}" if row.overflow > 0 else "",
    )

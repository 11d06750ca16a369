"""`diffusionpipe plan`: the best way to train a recipe or a profiled model on a cluster, and pictures of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diffusionpipe.cli.verbs.default_verb import DEFAULT, DefaultVerb
from diffusionpipe.cli.verbs.plan_draw import print_drawing
from diffusionpipe.cli.verbs.plan_options import (
    Batch,
    Cache,
    Checkpoint,
    ClusterName,
    Compare,
    Draw,
    Ema,
    Fill,
    FrozenDtypeName,
    LoraRank,
    Memory,
    ModelClass,
    ModelName,
    OptimizerName,
    Out,
    Overrides,
    ProfileFile,
    RecipeFile,
    Resolution,
    Use,
)
from diffusionpipe.cli.verbs.plan_show import show
from diffusionpipe.cli.verbs.stated_devices import Devices, LinkName, cluster_named
from diffusionpipe.cli.verbs.terminal import TERMINAL
from diffusionpipe.workflows.stated_model import named_model, profile_of, rows_a_picture

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.planner.asking import Asking
    from diffusionpipe.planner.chosen import Choice
    from diffusionpipe.planner.explain import Comparison
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.rivals.simulated import Rival
    from diffusionpipe.trainer.recipe import Recipe

app = typer.Typer(cls=DefaultVerb, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("show")(show)


@app.callback()
def plan() -> None:
    """Find the fastest layout that fits in the memory of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A question to the planner."""

    setting: Setting
    fill: bool | None
    sample_batch: int = 0
    """Samples that the recipe draws at a time."""
    versions: Versions | None = None
    """The weights that the recipe asks for, if there is one."""
    recipe: Recipe | None = None
    may_recompute: bool = False
    """Whether the planner may have all layers recomputed."""
    used: tuple[int, ...] = ()
    """The ranks of the cluster that are planned for; () for all."""


@app.command(DEFAULT, epilog="[bold]diffusionpipe plan show PLAN[/bold] shows and draws a plan.")
def make(
    context: typer.Context,
    recipe: RecipeFile = None,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    profile: ProfileFile = None,
    batch: Batch = None,
    out: Out = None,
    fill: Fill = None,
    compare: Compare = None,
    checkpoint: Checkpoint = None,
    ema: Ema = False,
    optimizer: OptimizerName = None,
    cache: Cache = True,
    model: ModelName = None,
    model_class: ModelClass = None,
    resolution: Resolution = None,
    lora_rank: LoraRank = None,
    frozen_dtype: FrozenDtypeName = None,
    draw: Draw = None,
    use: Use = None,
    memory: Memory = None,
    devices: Devices = None,
    link: LinkName = None,
) -> None:
    """Find the fastest layout that fits in the memory of a cluster, and explain the choice."""
    from diffusionpipe.cli.text.plan_compare import names_of
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.plan_asking import PlanCommand, check_memory, ranks_named
    from diffusionpipe.workflows.stated_setting import stated_setting
    from diffusionpipe.workflows.used_devices import allowed_of, used_of

    check_outputs(out)
    cluster = cluster_named(cluster, devices, link, other="--cluster")
    used = ranks_named(use)
    check_memory(memory)
    names = names_of(compare, writes=out is not None) if compare is not None else ()
    training = {"--checkpoint": checkpoint, "--ema": ema, "--optimizer": optimizer}
    stated = {"--model": model, "--model-class": model_class, "--draw": draw, **training}
    _check_options(recipe, stated, {"--profile or --model": profile or model or model_class, "--batch": batch})
    if draw:
        others = {"--out": out, "--compare": compare, "--lora-rank": lora_rank, "--frozen-dtype": frozen_dtype}
        _check_drawing({**training, **others, "--fill/--no-fill": None if fill is None else True})
    narrow = "bfloat16" if draw and (model or model_class) else frozen_dtype
    named = named_model(
        model, profile, kind=model_class, resolution=resolution, lora_rank=lora_rank, frozen_dtype=narrow
    )
    if recipe is not None:
        keys = {"training.batch": batch, "pipeline.use": f"[{use}]" if use else None, "pipeline.memory": memory}
        changes = [*(overrides or ()), *(f"{key}={value}" for key, value in keys.items() if value is not None)]
        asked = _of_recipe(recipe, changes, cluster, profile, uses_cache=cache, writes=bool(out))
    else:
        assert batch is not None
        machines = _cluster(cluster, None)
        made = profile_of(named or profile, machines, uses_cache=cache, may_split=not draw, tell=TERMINAL)
        machines = allowed_of(used_of(machines, used, source="--use"), memory)
        again, kind = tuple(checkpoint or ()), optimizer or "AdamW"
        setting = stated_setting(made, machines, batch, checkpoint=again, has_ema=ema, optimizer=kind)
        asked = _Asked(setting=setting, fill=None, used=used)
    if draw:
        print_drawing(asked.setting, steps=draw, rows_a_picture=rows_a_picture(named))
        return
    command = PlanCommand(context.obj, asked.used)
    _answer(asked, command, fill=fill if fill is not None else asked.fill, names=names, out=out)


def _check_drawing(options: Mapping[str, object]) -> None:
    """Refuse options of training, which have no effect on drawing."""
    from diffusionpipe.errors import ConfigError

    if wrong := [name for name, value in options.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: no effect on drawing; leave it out with --draw")


def _answer(asked: _Asked, command: Asking, *, fill: bool | None, names: Sequence[str], out: Path | None) -> None:
    """Show the plan, or the layouts of these systems' planners, and write it."""
    from diffusionpipe.cli.text.plan_compare import print_rivals, writable
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choice import choose, with_alternatives

    if names and len(asked.setting.graph.backbones) > 1:
        raise ConfigError(
            "--compare: these planners cut one backbone, but the profile has several; leave out --compare, the table "
            "names data parallelism and ZeRO-3"
        )
    choice = choose(asked.setting, fill=fill, asking=command, may_recompute=asked.may_recompute)
    if names:
        rivals = print_rivals(names, choice)
        if out:
            _write(writable(rivals), asked, out)
        return
    shown = with_alternatives(choice.with_unflushed(), choice, fill=fill, asking=command)
    _print_comparison(replace(asked, setting=choice.setting.whole or choice.setting), shown)
    _print_band(choice, asked.recipe, fill=fill)
    if out:
        _write(choice, asked, out)


def _of_recipe(
    recipe: Path, overrides: list[str], cluster: str | None, profile: Path | None, *, uses_cache: bool, writes: bool
) -> _Asked:
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.trainer.model.workload import samples_drawn_together
    from diffusionpipe.trainer.recipe import load_recipe
    from diffusionpipe.workflows.recipe_profile import make_profile_of, read_profile_of
    from diffusionpipe.workflows.recipe_setting import check_search, decided_for, may_recompute, setting_of
    from diffusionpipe.workflows.used_devices import used_of

    loaded = load_recipe(recipe, overrides)
    if writes and loaded.pipeline.versions is not Versions.FLUSHED:
        raise ConfigError(
            f'--out: a plan has a flush, and the recipe trains without one (pipeline.versions = "'
            f'{loaded.pipeline.versions}"); leave out --out, or give pipeline.versions=flushed'
        )
    whole = _cluster(cluster, loaded.pipeline.cluster)
    chosen = used_of(whole, loaded.pipeline.use, source="pipeline.use")
    check_search(loaded, chosen.num_ranks)
    loaded = loaded if profile else decided_for(loaded, whole)
    found = (
        read_profile_of(loaded, whole, profile, TERMINAL)
        if profile
        else make_profile_of(loaded, whole, uses_cache=uses_cache, tell=TERMINAL)
    )
    return _Asked(
        setting=setting_of(loaded, found, chosen),
        used=tuple(sorted(loaded.pipeline.use)),
        fill=loaded.pipeline.fill,
        sample_batch=samples_drawn_together(loaded),
        recipe=loaded,
        may_recompute=may_recompute(loaded),
        versions=loaded.pipeline.versions,
    )


def _write(found: Choice | Rival, asked: _Asked, out: Path) -> None:
    from diffusionpipe.ir.files import write_plan
    from diffusionpipe.workflows.prediction_file import write_prediction

    write_plan(found.plan(sample_batch=asked.sample_batch), out)
    beside = write_prediction(found.proposal.timeline, out)
    typer.echo(f"wrote {out} and its predicted timeline, {beside.name}", err=True)


def _check_options(recipe: Path | None, stated: Mapping[str, object], needed: Mapping[str, object]) -> None:
    """Refuse options that the recipe states, and a lack of those that it would."""
    from diffusionpipe.errors import ConfigError

    wrong = [name for name, value in stated.items() if value]
    if recipe is not None and wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: the recipe sets this; change the recipe, or override its key with key.path=value"
        )
    missing = [name for name, value in needed.items() if value is None]
    if recipe is None and missing:
        raise ConfigError(
            f"there is no recipe and no {' and no '.join(missing)}; give a recipe, or --batch and --profile or --model"
        )


def _cluster(name: str | None, of_recipe: str | None) -> Cluster:
    from diffusionpipe.costs.clusters import load_cluster, shipped_clusters
    from diffusionpipe.errors import ConfigError

    if name is None and of_recipe is None:
        raise ConfigError(
            "--cluster: this option is missing; give a cluster file, cards such as rtx3090x4, or one of "
            f"{', '.join(shipped_clusters())}"
        )
    return load_cluster(name or str(of_recipe))


def _print_comparison(asked: _Asked, comparison: Comparison) -> None:
    from rich.console import Console

    from diffusionpipe.cli.text.plan_table import table_lines
    from diffusionpipe.ir.versions import Versions

    console = Console(highlight=False)
    versions = asked.versions or Versions.FLUSHED
    for line, style in table_lines(asked.setting, comparison, width=max(console.width, 72), versions=versions):
        console.print(line, style=style, markup=False, soft_wrap=True)


def _print_band(choice: Choice, recipe: Recipe | None, *, fill: bool | None) -> None:
    from rich.console import Console

    from diffusionpipe.cli.text.plan_band import band_lines
    from diffusionpipe.workflows.decoding_text import decoding_lines

    console = Console(highlight=False)
    width = max(console.width, 72)
    decoding = decoding_lines(choice, recipe, width=width) if recipe else ()
    for line in (*band_lines(choice, width=width, fill=fill), *decoding):
        console.print(line, markup=False, soft_wrap=True)

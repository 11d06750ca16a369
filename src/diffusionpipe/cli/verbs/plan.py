"""`diffusionpipe plan`: the best way to train a recipe or a profiled model on a cluster, and pictures of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diffusionpipe.cli.text.plan_screen import screen_lines, title_of
from diffusionpipe.cli.verbs.default_verb import DEFAULT, DefaultVerb
from diffusionpipe.cli.verbs.plan_draw import print_drawing
from diffusionpipe.cli.verbs.plan_models import print_models
from diffusionpipe.cli.verbs.plan_options import (
    All,
    Batch,
    Cache,
    CaptionChunks,
    Checkpoint,
    ClusterName,
    Compare,
    Draw,
    Ema,
    Fill,
    FrozenDtypeName,
    GradientsName,
    LoraRank,
    Memory,
    ModelClass,
    ModelName,
    Models,
    OptimizerName,
    Out,
    Overrides,
    ProfileFile,
    Quality,
    RecipeFile,
    Resolution,
    Use,
    WeightsName,
)
from diffusionpipe.cli.verbs.plan_quality import print_quality
from diffusionpipe.cli.verbs.plan_show import show
from diffusionpipe.cli.verbs.stated_devices import Devices, LinkName, cluster_named
from diffusionpipe.cli.verbs.terminal import TERMINAL
from diffusionpipe.workflows.planning.alternatives_file import write_alternatives
from diffusionpipe.workflows.planning.question import (
    PlanQuestion,
    answered,
    cluster_of,
    question_of_recipe,
    write_answer,
)
from diffusionpipe.workflows.planning.run_quality import reached_by
from diffusionpipe.workflows.planning.stated_model import named_model, rows_a_picture
from diffusionpipe.workflows.training.cache_worth import worth_of_recipe

if TYPE_CHECKING:
    from diffusionpipe.cli.text.plan_table import Line
    from diffusionpipe.cli.verbs.plan_asking import PlanCommand
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.planner.choosing.explain import Comparison
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.rivals.simulated import Rival

app = typer.Typer(cls=DefaultVerb, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("show")(show)


@app.callback()
def plan() -> None:
    """Find the fastest layout that fits in the memory of a cluster."""


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
    caption_chunks: CaptionChunks = None,
    draw: Draw = None,
    use: Use = None,
    memory: Memory = None,
    devices: Devices = None,
    link: LinkName = None,
    shows_all: All = False,
    models: Models = None,
    quality: Quality = None,
    weights: WeightsName = None,
    gradients: GradientsName = None,
) -> None:
    """Find the fastest layout that fits in the memory of a cluster, and explain the choice."""
    from diffusionpipe.cli.text.plan_compare import names_of
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.plan_asking import PlanCommand, batches_named, check_memory, ranks_named
    from diffusionpipe.cli.verbs.plan_widths import asked_by_width
    from diffusionpipe.workflows.planning.question import StatedPlace, StatedTraining, question_of_model
    from diffusionpipe.workflows.planning.used_devices import allowed_of, used_of

    check_outputs(out)
    cluster = cluster_named(cluster, devices, link, other="--cluster")
    used, batches = ranks_named(use), batches_named(batch)
    check_memory(memory)
    of_training = {"--checkpoint": checkpoint, "--ema": ema, "--optimizer": optimizer, "--gradients": gradients}
    of_adapters = {"--lora-rank": lora_rank, "--frozen-dtype": frozen_dtype, "--weights": weights}
    if models is not None:
        of_one = {"RECIPE": recipe, "--model": model, "--model-class": model_class, "--profile": profile, "--out": out}
        others = {"--draw": draw, "--compare": compare, "--resolution": resolution, "--caption-chunks": caption_chunks}
        _refuse(
            {**of_one, **others, "--quality": quality, **of_adapters, **of_training},
            "--models; leave it out, or name one model",
        )
        machines = allowed_of(used_of(cluster_of(cluster), used, source="--use"), memory)
        print_models(models, machines, batches, uses_cache=cache)
        return
    if quality is not None:
        _refuse({"--draw": draw, "--compare": compare, "--out": out, "--all": shows_all}, "--quality; leave it out")
        reached = reached_by(quality)  # refused here, before anything is counted
    names = names_of(compare, writes=out is not None) if compare is not None else ()
    stated = {"--model": model, "--model-class": model_class, "--draw": draw, **of_training}
    _check_options(recipe, stated, {"--profile or --model": profile or model or model_class})
    if draw:
        of_plans = {"--compare": compare, "--fill/--no-fill": fill is not None}
        _check_drawing(batches, {**of_training, **of_plans, **of_adapters})
        frozen_dtype = "bfloat16" if model or model_class else None  # as `sample` stores them
    is_auto = frozen_dtype == "auto"
    named = named_model(
        model,
        profile,
        kind=model_class,
        resolution=resolution,
        lora_rank=lora_rank,
        frozen_dtype="bfloat16" if is_auto and (model or model_class) else frozen_dtype,
        weights=weights,
        caption_chunks=caption_chunks,
    )
    if recipe is not None:
        keys = {
            "training.batch": batches[0] if batches else None,
            "pipeline.use": f"[{use}]" if use else None,
            "pipeline.memory": memory,
        }
        changes = [*(overrides or ()), *(f"{key}={value}" for key, value in keys.items() if value is not None)]
        asked = question_of_recipe(
            recipe, changes, cluster=cluster, profile=profile, uses_cache=cache, writes=bool(out), tell=TERMINAL
        )
        # A batch that the recipe states is the only one, unless the command asks for others.
        batches = batches if batch is not None else (asked.setting.workload.batch,)
    else:
        training = StatedTraining(
            batch=batches[0] if batches else None,
            checkpoint=checkpoint,
            has_ema=ema,
            optimizer=optimizer or "AdamW",
            gradients=gradients,
            is_drawn=bool(draw),
        )
        place = StatedPlace(cluster=cluster, used=used, memory=memory)
        ask = partial(question_of_model, training=training, place=place, uses_cache=cache, tell=TERMINAL)
        asked = asked_by_width(named, ask) if named is not None and is_auto else ask(named or profile)
    asked = replace(asked, fill=fill if fill is not None else asked.fill)
    if draw:
        print_drawing(asked.setting, steps=draw, rows_a_picture=rows_a_picture(named), out=out)
        return
    if quality is not None:
        print_quality(quality, reached, asked, batches if batch is not None else ())
        return
    command = PlanCommand(context.obj, asked.used, has_recipe=recipe is not None)
    asked = replace(asked, batches=batches)
    _answer(asked, command, names=names, out=out, shows_all=shows_all)


def _check_drawing(batches: Sequence[int], options: Mapping[str, object]) -> None:
    """Refuse options of training, which have no effect on drawing, and anything but one number of pictures.

    `batches`: the numbers of --batch. `options`: name of each option of training -> its value.

    Raises:
        ConfigError: an option has a value, or `batches` does not have one number.
    """
    from diffusionpipe.errors import ConfigError

    if len(batches) != 1:
        raise ConfigError("--draw: give --batch N, the pictures that are drawn together")
    _refuse(options, "drawing; leave it out with --draw")


def _refuse(options: Mapping[str, object], rest: str) -> None:
    """Refuse options (name -> value) that have a value; `rest`: the end of the error's sentence.

    Raises:
        ConfigError: one is given.
    """
    from diffusionpipe.errors import ConfigError

    if wrong := [name for name, value in options.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: no effect on {rest}")


def _answer(
    asked: PlanQuestion, command: PlanCommand, *, names: Sequence[str], out: Path | None, shows_all: bool = False
) -> None:
    """Search the plan, show it, and write it to `out` if that is not None.

    `names`: systems whose planners' layouts are shown beside it; then `out` gets the layout of the one named.

    Raises:
        ConfigError: nothing fits, systems are named and the model has several backbones, or nothing can be written.
    """
    from diffusionpipe.cli.text.plan_compare import print_rivals, writable
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choosing.band import band_of
    from diffusionpipe.planner.choosing.choice import with_alternatives

    fill = asked.fill
    if names and len(asked.setting.graph.backbones) > 1:
        raise ConfigError(
            "--compare: these planners cut one backbone, but the profile has several; leave out --compare, the table "
            "names data parallelism and ZeRO-3"
        )
    tried, choice = answered(asked, command, TERMINAL)
    if names:
        rivals = print_rivals(names, choice)
        if out:
            _write(writable(rivals, names), asked, out)
        return
    # The choice may have its frozen part elsewhere; the screen shows the setting that was asked for.
    setting = choice.setting.whole or choice.setting
    if not asked.batches:  # other plans are asked for at the batch of this one
        command = replace(command, arguments=command.with_option("--batch", str(setting.workload.batch)))
    if shows_all:
        shown = with_alternatives(choice.with_unflushed(), choice, fill=fill, asking=command)
        _print_comparison(replace(asked, setting=setting), shown)
        _print_band(choice, asked)
    else:
        shown = with_alternatives(choice.comparison(), choice, fill=fill, asking=command)
        _print_screen(screen_lines(_title(asked, setting), tried, choice, shown, band_of(choice, fill=fill)))
    if asked.recipe is not None and asked.recipe.pipeline.may_cache:
        plan = choice.plan(sample_batch=asked.sample_batch)
        for line in worth_of_recipe(asked.recipe, plan, choice.setting, TERMINAL):
            typer.echo(line)
    if out:
        _write(choice, asked, out)
        write_alternatives(shown, choice.plan(sample_batch=asked.sample_batch), out)


def _title(asked: PlanQuestion, setting: Setting) -> str:
    """The title of the plan's screen: the model's name, the cluster, the arithmetic, the types of stored weights."""
    from diffusionpipe.costs.graph import BYTES_OF_STORED, frozen_store, frozen_stores, wider_bytes

    name = asked.model.name if asked.model else asked.recipe.run.folder.name if asked.recipe else "profile"
    stored, (wider, whole) = frozen_store(setting.graph), wider_bytes(setting.graph)
    # Layers that cannot be narrow make the name alone misleading.
    if wider < whole:
        stored = " and ".join(form for form in frozen_stores(setting.graph) if form in BYTES_OF_STORED)
        stored += f" ({wider / 2**30:.1f} of {whole / 2**30:.1f} GiB stay wider)"
    return title_of(name, setting, stored=stored)


def _write(found: Choice | Rival, asked: PlanQuestion, out: Path) -> None:
    beside = write_answer(found, asked, out)
    typer.echo(f"wrote {out} and its predicted timeline, {beside.name}", err=True)


def _check_options(recipe: Path | None, stated: Mapping[str, object], needed: Mapping[str, object]) -> None:
    """Refuse options that a recipe sets itself, and without a recipe the lack of options that are needed then.

    `stated`, `needed`: name of each such option -> its value.

    Raises:
        ConfigError: names these options.
    """
    from diffusionpipe.errors import ConfigError

    wrong = [name for name, value in stated.items() if value]
    if recipe is not None and wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: the recipe sets this; change the recipe, or override its key with key.path=value"
        )
    missing = [name for name, value in needed.items() if value is None]
    if recipe is None and missing:
        raise ConfigError(f"there is no recipe and no {' and no '.join(missing)}; give a recipe, --model or --profile")


def _print_screen(lines: Iterable[Line]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line, style in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def _print_comparison(asked: PlanQuestion, comparison: Comparison) -> None:
    from rich.console import Console

    from diffusionpipe.cli.text.plan_table import table_lines
    from diffusionpipe.ir.versions import Versions

    console = Console(highlight=False)
    versions = asked.versions or Versions.FLUSHED
    for line, style in table_lines(asked.setting, comparison, width=max(console.width, 72), versions=versions):
        console.print(line, style=style, markup=False, soft_wrap=True)


def _print_band(choice: Choice, asked: PlanQuestion) -> None:
    from rich.console import Console

    from diffusionpipe.cli.text.plan_band import band_lines
    from diffusionpipe.workflows.training.decoding_text import decoding_lines

    console = Console(highlight=False)
    width = max(console.width, 72)
    decoding = decoding_lines(choice, asked.recipe, width=width) if asked.recipe else ()
    for line in (*band_lines(choice, width=width, fill=asked.fill), *decoding):
        console.print(line, markup=False, soft_wrap=True)

"""`diffusionpipe plan`: the best way to train a recipe or a profiled model on a cluster, and pictures of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.default_verb import DEFAULT, DefaultVerb
from diffusionpipe.cli.plan_draw import print_drawing
from diffusionpipe.cli.plan_show import show
from diffusionpipe.cli.stated_model import named_model, profile_of, rows_a_picture

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster, Profile
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.planner.choice import Choice
    from diffusionpipe.planner.explain import Comparison
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.rivals.simulated import Rival
    from diffusionpipe.trainer.recipe import Recipe

RecipeFile = Annotated[
    Path | None,
    typer.Argument(help="The recipe to plan for. Without a recipe, give --batch, and --model or --profile."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Keys of the recipe to change: key.path=value.", show_default=False),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A cluster file or a known cluster, e.g. a100-80x8:4 for four nodes of that kind; default: "
        "pipeline.cluster.",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file that `diffusionpipe profile` wrote. With a recipe it is optional: layer times are then "
        "computed for a known device, or measured once on this machine and kept in "
        "$XDG_CACHE_HOME/diffusionpipe/profiles "
        "(~/.cache if that is not set).",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, help="Global batch: samples of one step over all devices; default: the recipe's."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Write the plan file, which pipeline.plan takes, and its prediction.")]
Fill = Annotated[
    bool | None,
    typer.Option(
        help="Run the encoders for the next batch in the pipeline bubbles, or for each batch before its first "
        "forward; default: pipeline.fill of the recipe, else the faster of the two."
    ),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Show the layouts that other systems' planners choose, simulated: all, or some of pipedream, dapple, spp, "
        "gpipe, ddp, zero3, with commas between. With one name, --out writes that system's plan.",
    ),
]
Checkpoint = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Activation checkpointing: layers to recompute in the backward pass, e.g. '*'. Not with a recipe.",
    ),
]
Ema = Annotated[
    bool,
    typer.Option(help="Keep an exponential moving average (EMA) of the trained parameters. Not with a recipe."),
]
OptimizerName = Annotated[
    str | None, typer.Option(help="A class of torch.optim, e.g. SGD; default: AdamW. Not with a recipe.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A shipped model, e.g. sd-2.1, a diffusers folder or a hub id, in place of --profile: its layer times are "
        "computed for the cluster's device and kept. Not with a recipe.",
        show_default=False,
    ),
]
ModelClass = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A transformer class of the installed diffusers at its default size, e.g. MiniMaxH3Transformer3DModel, in "
        "place of --model: without a folder, encoders or VAE. Not with a recipe.",
        show_default=False,
    ),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE",
        help="With --model or --model-class: side of a picture in pixels, or WIDTHxHEIGHTxFRAMES, e.g. 832x480x81, to "
        "plan for clips, which `train` does not take yet; default: the published side.",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="With --model or --model-class: train adapters of this rank on the denoiser."),
]
FrozenDtypeName = Annotated[
    str | None,
    typer.Option(help="With --model or --model-class: bfloat16 stores frozen matrices so, as model.frozen_dtype does."),
]
Draw = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        min=1,
        max=1_000_000,
        help="Predict drawing in place of training: seconds a picture and memory for --batch pictures that are drawn "
        "together over all devices, as `sample --ranks` does, with this number of denoising steps. Not with a recipe.",
        show_default=False,
    ),
]
Cache = Annotated[bool, typer.Option(help="Keep new profiles for later commands, and reuse kept ones.")]


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


@app.command(DEFAULT, epilog="[bold]diffusionpipe plan show PLAN[/bold] shows and draws a plan.")
def make(
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
) -> None:
    """Find the fastest layout that fits in the memory of a cluster, and explain the choice."""
    from diffusionpipe.cli.outputs import check_outputs
    from diffusionpipe.cli.plan_compare import names_of

    check_outputs(out)
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
        batches = [f"training.batch={batch}"] if batch else []
        asked = _of_recipe(recipe, [*(overrides or ()), *batches], cluster, profile, uses_cache=cache, writes=bool(out))
    else:
        assert batch is not None
        machines = _cluster(cluster, None)
        made = profile_of(named or profile, machines, uses_cache=cache)
        again, kind = tuple(checkpoint or ()), optimizer or "AdamW"
        setting = stated_setting(made, machines, batch, checkpoint=again, has_ema=ema, optimizer=kind)
        asked = _Asked(setting=setting, fill=None)
    if draw:
        print_drawing(asked.setting, steps=draw, rows_a_picture=rows_a_picture(named))
        return
    _answer(asked, fill=fill if fill is not None else asked.fill, names=names, out=out)


def _check_drawing(options: Mapping[str, object]) -> None:
    """Refuse options of training, which have no effect on drawing."""
    from diffusionpipe.errors import ConfigError

    if wrong := [name for name, value in options.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: no effect on drawing; leave it out with --draw")


def _answer(asked: _Asked, *, fill: bool | None, names: Sequence[str], out: Path | None) -> None:
    """Show the plan, or the layouts of these systems' planners, and write it."""
    from diffusionpipe.cli.plan_compare import print_rivals, writable
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choice import choose

    if names and len(asked.setting.graph.backbones) > 1:
        raise ConfigError(
            "--compare: these planners cut one backbone, but the profile has several; leave out --compare, the table "
            "names data parallelism and ZeRO-3"
        )
    choice = choose(asked.setting, fill=fill)
    if names:
        rivals = print_rivals(names, choice)
        if out:
            _write(writable(rivals), asked, out)
        return
    _print_comparison(asked, choice.with_unflushed())
    _print_band(choice, asked.recipe)
    if out:
        _write(choice, asked, out)


def _of_recipe(
    recipe: Path, overrides: list[str], cluster: str | None, profile: Path | None, *, uses_cache: bool, writes: bool
) -> _Asked:
    from diffusionpipe.cli.recipe_profile import make_profile_of, read_profile_of
    from diffusionpipe.cli.recipe_setting import check_search, setting_of
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.trainer.recipe import load_recipe
    from diffusionpipe.trainer.workload import samples_drawn_together

    loaded = load_recipe(recipe, overrides)
    if writes and loaded.pipeline.versions is not Versions.FLUSHED:
        raise ConfigError(
            f'--out: a plan has a flush, and the recipe trains without one (pipeline.versions = "'
            f'{loaded.pipeline.versions}"); leave out --out, or give pipeline.versions=flushed'
        )
    chosen = _cluster(cluster, loaded.pipeline.cluster)
    check_search(loaded, chosen.num_ranks)
    found = (
        read_profile_of(loaded, chosen, profile) if profile else make_profile_of(loaded, chosen, uses_cache=uses_cache)
    )
    return _Asked(
        setting=setting_of(loaded, found, chosen),
        fill=loaded.pipeline.fill,
        sample_batch=samples_drawn_together(loaded),
        recipe=loaded,
        versions=loaded.pipeline.versions,
    )


def _write(found: Choice | Rival, asked: _Asked, out: Path) -> None:
    from diffusionpipe.cli.prediction_file import write_prediction
    from diffusionpipe.ir.files import write_plan

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
            f"--cluster: this option is missing; give a cluster file or one of {', '.join(shipped_clusters())}"
        )
    return load_cluster(name or str(of_recipe))


def stated_setting(
    profile: Profile, cluster: Cluster, batch: int, *, checkpoint: tuple[str, ...], has_ema: bool, optimizer: str
) -> Setting:
    """A training that is stated on the command line; parameters are as wide as the profile has them."""
    from diffusionpipe.costs import Workload
    from diffusionpipe.costs.workload import state_of_optimizer
    from diffusionpipe.planner.pricing.setting import Setting

    width = 8 if profile.precision == "float64" else 4
    workload = Workload(
        batch=batch,
        parameter_bytes=width,
        gradient_bytes=width,
        optimizer_bytes=width * state_of_optimizer(optimizer),
        ema_bytes=width if has_ema else 0,
        checkpointed=checkpoint,
    )
    return Setting(profile=profile, cluster=cluster, workload=workload)


def _print_comparison(asked: _Asked, comparison: Comparison) -> None:
    from rich.console import Console

    from diffusionpipe.cli.plan_table import table_lines
    from diffusionpipe.ir.versions import Versions

    console = Console(highlight=False)
    versions = asked.versions or Versions.FLUSHED
    for line, style in table_lines(asked.setting, comparison, width=max(console.width, 72), versions=versions):
        console.print(line, style=style, markup=False, soft_wrap=True)


def _print_band(choice: Choice, recipe: Recipe | None) -> None:
    from rich.console import Console

    from diffusionpipe.cli.decoding_text import decoding_lines
    from diffusionpipe.cli.plan_band import band_lines

    console = Console(highlight=False)
    width = max(console.width, 72)
    for line in (*band_lines(choice, width=width), *(decoding_lines(choice, recipe, width=width) if recipe else ())):
        console.print(line, markup=False, soft_wrap=True)

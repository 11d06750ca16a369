"""`diffusionpipe train RECIPE`: start the ranks, or join the job that torchrun has started."""

import logging
import os
import sys
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster, ModelGraph, Profile
    from diffusionpipe.ir import Plan, Timeline
    from diffusionpipe.trainer.drawing import Picture
    from diffusionpipe.trainer.recipe import Recipe

logger = logging.getLogger(__name__)


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to change: key.path=value, e.g. training.batch=64.", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes to start, one per device; default: one per GPU, else 1. Not under torchrun."
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help='Go on from a checkpoint of the run: "latest", a step, or a path.')
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    port: Annotated[
        int | None, typer.Option(help="Port of the ranks' meeting point; default: any free one. Not under torchrun.")
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            help="Keep what is measured of the layers for other runs, and use what is kept: in "
            "$XDG_CACHE_HOME/diffusionpipe/profiles (~/.cache if that is not set)."
        ),
    ] = True,
) -> None:
    """Train a diffusion model by pipeline parallelism."""
    from diffusionpipe.trainer.launch import is_under_torchrun, launch
    from diffusionpipe.trainer.recipe_file import load_recipe
    from diffusionpipe.trainer.trackers import check_trackers

    loaded = load_recipe(recipe, overrides or ())
    if is_under_torchrun(os.environ):
        _refuse_launch_options(ranks, port)
        _join(loaded, resume, device, uses_cache=cache)
        return
    _check_folders(loaded)
    check_trackers(loaded)
    count = ranks or _default_ranks(device)
    if count == 1 and port is None:
        _join(loaded, resume, device, uses_cache=cache)
        return
    status = launch(
        [sys.executable, "-m", "diffusionpipe", *_arguments(recipe, overrides or (), resume, device, uses_cache=cache)],
        ranks=count,
        log_folder=loaded.run.folder / "logs",
        environ=os.environ,
        port=port,
    )
    if status:
        raise typer.Exit(status)


def _arguments(
    recipe: Path, overrides: Sequence[str], resume: str | None, device: str, *, uses_cache: bool
) -> list[str]:
    """The command line of each rank."""
    options = ["--device", device, *(["--resume", resume] if resume is not None else [])]
    options += [] if uses_cache else ["--no-cache"]
    return ["train", str(recipe), *overrides, *options]


def _refuse_launch_options(ranks: int | None, port: int | None) -> None:
    from diffusionpipe.errors import ConfigError

    if ranks is not None or port is not None:
        raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")


def _check_folders(recipe: "Recipe") -> None:
    """Refuse before any process starts what is plainly not there.

    Raises:
        ConfigError: a folder of the recipe does not exist.
    """
    from diffusionpipe.errors import DataError

    folders = {"data.train": recipe.data.train, "data.validation": recipe.data.validation}
    missing = [f"{key}: there is no folder {path}" for key, path in folders.items() if path and not path.is_dir()]
    if missing:
        raise DataError("\n".join(missing))


def _default_ranks(device: str) -> int:
    import torch

    return max(1, torch.cuda.device_count()) if device != "cpu" else 1


def _join(recipe: "Recipe", resume: str | None, device: str, *, uses_cache: bool) -> None:
    """Be one rank of the job, from the first rendezvous to the last picture."""
    import torch

    from diffusionpipe.cli.job_profiles import CachedProfiles
    from diffusionpipe.cli.profile_cache import cache_folder
    from diffusionpipe.cli.recipe_setting import check_search
    from diffusionpipe.runtime.process_group import joined, leave, membership
    from diffusionpipe.trainer.run import Hooks, run

    member = membership(os.environ)
    _log(member.rank)
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() > member.local_rank else "cpu"
    try:
        with joined(member, device=device) as job:
            job.agree("the recipe", recipe.model_dump_json())
            if recipe.pipeline.is_searched:
                check_search(recipe, member.world_size)
            shelf = CachedProfiles(folder=cache_folder(os.environ)) if uses_cache else None
            hooks = Hooks(make_plan=_make_plan, save_grid=_save_grid, profiles=shelf)
            steps = run(recipe, job, hooks, resume=resume)
    except (Exception, KeyboardInterrupt) as error:
        if member.world_size == 1 and not member.is_launched:
            raise
        leave(error, member)
    if member.rank == 0 and steps == recipe.training.steps:
        _draw_results(recipe)


def _log(rank: int) -> None:
    """Messages of rank 0 and warnings of all ranks go to the standard error stream."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank={rank} %(message)s", datefmt="%H:%M:%S"))
    package = logging.getLogger("diffusionpipe")
    package.addHandler(handler)
    package.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def _make_plan(
    model: "ModelGraph",
    recipe: "Recipe",
    num_ranks: int,
    profile: "Profile | None" = None,
    cluster: "Cluster | None" = None,
) -> "Plan":
    """The plan that the recipe's [pipeline] section asks for."""
    from diffusionpipe.planner import Layout, build_plan, plan_from_profile, predicted_timeline
    from diffusionpipe.planner.stage_costs import update_time
    from diffusionpipe.trainer.layout import replicas_of_stages
    from diffusionpipe.trainer.workload import samples_drawn_together

    if profile is not None and cluster is not None:
        return _searched_plan(recipe, profile, cluster)
    replicas, sizes = replicas_of_stages(recipe.pipeline, num_ranks), recipe.pipeline.sizes
    layout = Layout(
        batch=recipe.training.batch,
        stages=len(replicas),
        microbatches=sizes.microbatches,
        schedule=sizes.schedule,
        replicas=replicas,
        data_parallel=sizes.data_parallel,
        sharded=sizes.sharded,
        buckets=0 if sizes.sharded else 1,
        encode_chunk=sizes.encode_chunk,
        offload_frozen=sizes.offload_frozen,
        splits=recipe.pipeline.splits,
        checkpointed=recipe.training.activation_checkpointing,
        sample_batch=samples_drawn_together(recipe),
    )
    if profile is None:
        return build_plan(model, layout)
    plan = plan_from_profile(profile, layout)
    update = update_time(plan.train, plan.blocks, profile, plan.mesh)
    logger.info("%s", _step_text(predicted_timeline(profile, plan).makespan, update))
    return plan


def _step_text(iteration: float, update: float) -> str:
    """The predicted time of a step and of its parts."""
    return f"predicted_step_s={iteration + update:.4f} iteration_s={iteration:.4f} update_s={update:.4f}"


def _searched_plan(recipe: "Recipe", profile: "Profile", cluster: "Cluster") -> "Plan":
    """The fastest plan, with the reason in the log."""
    from diffusionpipe.cli.recipe_setting import setting_of
    from diffusionpipe.planner import choose
    from diffusionpipe.trainer.workload import samples_drawn_together

    choice = choose(setting_of(recipe, profile, cluster), fill=recipe.pipeline.fill)
    proposal = choice.proposal
    logger.info('plan="%s" %s', choice.sizes, _step_text(proposal.iteration, proposal.update))
    logger.info("%s", choice.comparison().verdict)
    return choice.plan(sample_batch=samples_drawn_together(recipe))


def _save_grid(pictures: "Sequence[Picture]", captions: Sequence[str], path: Path) -> None:
    from diffusionpipe.viz.grid import sample_grid

    sample_grid(list(zip(captions, pictures, strict=True)), path, columns=grid_columns(len(pictures)))


def grid_columns(count: int) -> int:
    """Columns of a grid that is about as wide as high, with full rows where that is possible, at most 10."""
    square = min(10, isqrt(max(0, count - 1)) + 1)
    return next((columns for columns in range(square, 11) if count % columns == 0), square)


def _predicted(recipe: "Recipe", plan: "Plan") -> "Timeline | None":
    """The predicted timeline of a run's plan, None if nothing is known of its times.

    A run that measured has its profile, and the cluster if it was searched for; a plan file its prediction beside it.
    """
    from diffusionpipe.cli.prediction_file import read_prediction
    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.planner import predicted_timeline

    if recipe.pipeline.plan_file is not None:
        return read_prediction(recipe.pipeline.plan_file, plan)
    if not recipe.pipeline.is_profiled:
        return None
    folder = recipe.run.folder
    cluster = load_cluster(str(folder / "cluster.json")) if recipe.pipeline.is_searched else None
    return predicted_timeline(read_profile(folder / "profile.json"), plan, cluster)


def _title(plan: "Plan") -> str:
    """The schedule and its sizes, for a picture of one of its iterations."""
    from diffusionpipe.ir import Op

    microbatches = sum(len(p.microbatches) for p in plan.train.placement.pipelines if Op.ENCODE not in p.ops)
    ranks = _count(plan.mesh.num_ranks, "rank")
    if plan.mesh.data_parallel > 1:
        ranks += f" in {plan.mesh.data_parallel} groups, of which one is shown"
    return f"{plan.train.name}: {ranks}, {_count(microbatches, 'micro-batch', 'es')}, batch {plan.batch}"


def _count(number: int, name: str, ending: str = "s") -> str:
    return f"{number} {name}{ending if number != 1 else ''}"


def _draw_results(recipe: "Recipe") -> None:
    """The pictures of a finished run: loss curve, timeline, trace, and the last samples under a fixed name."""
    import shutil

    from diffusionpipe.ir.files import read_plan, read_timeline
    from diffusionpipe.viz.gantt import gantt
    from diffusionpipe.viz.metrics import loss_curve
    from diffusionpipe.viz.perfetto import perfetto

    folder = recipe.run.folder
    loss_curve(folder / "metrics.jsonl", folder / "loss.png")
    if (folder / "timeline.json").exists():
        timeline, plan = read_timeline(folder / "timeline.json"), read_plan(folder / "plan.json")
        predicted = _predicted(recipe, plan)
        panels = [*([("predicted", predicted)] if predicted is not None else []), ("measured", timeline)]
        gantt(panels, folder / "timeline.png", title=_title(plan), schedule=plan.train)
        perfetto(timeline, folder / "trace.json", schedule=plan.train)
    samples = sorted((folder / "samples").glob("step-*.png"))
    if samples:
        shutil.copyfile(samples[-1], folder / "samples.png")
    typer.echo(
        f"Results in {folder}: samples.png, loss.png, timeline.png, trace.json (open in ui.perfetto.dev), export/"
    )

"""`diffusionpipe train RECIPE`: start the ranks, or join the job that torchrun has started."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.membership import Membership
    from diffusionpipe.trainer.inference.drawing import Picture
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.reporting.screen import Screen
    from diffusionpipe.workflows.training.job import TrainingJob
    from diffusionpipe.workflows.training.run_check import Command

logger = logging.getLogger(__name__)

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Keys to change: key.path=value, e.g. training.batch=64.", show_default=False),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Processes to start, one per device; default: one per GPU, else 1. Not under torchrun.",
    ),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        help='Resume from a checkpoint of the run: "latest", a step, or a path. "auto": from the newest '
        "undamaged one, or from the beginning if there is none."
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Use the run folder although a job on another machine holds its lock, if that job gives no sign of "
        "life for a minute.",
    ),
]
MaxRestartsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=1_000_000,
        help="Restart all ranks at most this many times after a crash, with --resume auto. Two restarts in a row "
        "without a new step or checkpoint end the job. Not under torchrun.",
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(help="TCP port on which the ranks connect (master port); default: any free port. Not under torchrun."),
]
CacheOption = Annotated[
    bool,
    typer.Option(
        help="Keep the measured layer times for later runs, and reuse kept ones, in "
        "$XDG_CACHE_HOME/diffusionpipe/profiles (~/.cache if that is not set)."
    ),
]


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    ranks: RanksOption = None,
    resume: ResumeOption = None,
    take_over: TakeOverOption = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    max_restarts: MaxRestartsOption = 0,
    port: PortOption = None,
    cache: CacheOption = True,
) -> None:
    """Train a diffusion model by pipeline parallelism."""
    from diffusionpipe.workflows.ranks import is_rank
    from diffusionpipe.workflows.training.job import TrainingJob
    from diffusionpipe.workflows.training.run_check import Command

    is_one = is_rank()
    screen = _screen_of(os.environ["RANK"] if is_one else "")
    with screen.work("starting"):  # torch takes seconds to import
        from diffusionpipe.runtime.job.membership import Membership, membership
        from diffusionpipe.trainer.course.resuming import resume_of_attempt
        from diffusionpipe.trainer.recipe import load_recipe, ranks_that_train
        from diffusionpipe.workflows.training.recipe_checks import checks_of_run

        member = membership(os.environ) if is_one else Membership()
        count = member.world_size if is_one else ranks or _default_ranks(device)
        if (restarted := resume_of_attempt(resume, member.attempt)) != resume:
            resume = restarted
            logger.info("restarted=%d resume=%s", member.attempt, resume)
        checks = checks_of_run(count, resume, all_train=member.is_launched)
        loaded = load_recipe(recipe, overrides or (), checks)
    # A launched rank does not know how many were asked for. We assume the fewest that the recipe's keys allow.
    started = max([count, *(rank + 1 for rank in loaded.pipeline.use)]) if member.is_launched else count
    used = ranks_that_train(loaded.pipeline, started)
    if is_one:
        _refuse_launch_options(ranks, port, max_restarts)
    elif left_out := [str(number) for number in range(count) if number not in used]:
        logger.info("left out, as pipeline.use asks: %s", ", ".join(left_out))
    if is_one or (len(used) == 1 and port is None and not max_restarts):
        member = member if is_one else replace(member, local_rank=used[0])
        command = Command(recipe=recipe, overrides=overrides or (), ranks=started, device=device)
        part = _Part(loaded, resume, device, command, member, take_over=take_over, uses_cache=cache)
        _take_place(part, used, screen)
        return
    job = TrainingJob(
        recipe=recipe,
        overrides=overrides or (),
        folder=loaded.run.folder,
        devices=used,
        device=device,
        resume=resume,
        take_over=take_over,
        port=port,
        max_restarts=max_restarts,
        uses_cache=cache,
    )
    _launch(job, loaded)


def _screen_of(number: str) -> "Screen":
    """The screen of a rank, to which it logs; "" for a process without a rank."""
    from rich.console import Console

    from diffusionpipe.cli.verbs.output import log_to
    from diffusionpipe.trainer.reporting.screen import Screen

    rank = int(number) if number.isdecimal() else None  # `membership` refuses any other
    screen = Screen(Console(stderr=True), speaks=not rank)
    log_to(screen.console, rank)
    return screen


def _take_place(part: "_Part", used: Sequence[int], screen: "Screen") -> None:
    """Join as the rank that this process is among the used ones, or end if it is none of them."""
    from diffusionpipe.cli.verbs.used_ranks import place_among

    placed = place_among(part.member, used, os.environ)
    if placed is None:
        logger.warning("left out, as pipeline.use asks: ranks %s train", ", ".join(map(str, used)))
        return
    if placed.rank != part.member.rank:
        screen = _screen_of(str(placed.rank))
    _join(replace(part, member=placed), screen)


def _launch(job: "TrainingJob", recipe: "Recipe") -> None:
    """Start the ranks, and end as they end."""
    from diffusionpipe.workflows.training.job import check_start, start

    check_start(job, recipe)
    logger.info("starting ranks=%d run=%s", len(job.devices), recipe.run.folder)
    if status := start(job):
        _end_with(status)


def _end_with(status: int) -> NoReturn:
    """End the launcher as its ranks have ended."""
    from diffusionpipe.trainer.launching.exit_status import ExitStatus, of_signal, signal_name

    if status > ExitStatus.STOPPED:
        name = signal_name(status - of_signal(0))
        logger.warning("ended at once, no new checkpoint was saved signal=%s exit_status=%d", name, status)
    raise typer.Exit(status)


def _refuse_launch_options(ranks: int | None, port: int | None, max_restarts: int) -> None:
    from diffusionpipe.errors import ConfigError

    if max_restarts:
        raise ConfigError("torchrun restarts the ranks itself: give --max-restarts to torchrun, before the program")
    if ranks is not None or port is not None:
        raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")


def _default_ranks(device: str) -> int:
    import torch

    return max(1, torch.cuda.device_count()) if device != "cpu" else 1


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of this process in the job, if it is a rank."""

    recipe: "Recipe"
    resume: str | None
    device: str
    command: "Command"
    member: "Membership"
    take_over: bool
    uses_cache: bool


def _join(part: _Part, screen: "Screen") -> None:
    """Be one rank of the job, from the first rendezvous to the last picture."""
    from diffusionpipe.cli.text.check_text import ConsoleReport
    from diffusionpipe.cli.verbs.run_report import RunReport
    from diffusionpipe.errors import TrainingError
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.runtime.job.process_group import joined, leave
    from diffusionpipe.runtime.machine.determinism import be_deterministic
    from diffusionpipe.runtime.machine.error_file import out_of_memory
    from diffusionpipe.trainer.course.run import run
    from diffusionpipe.trainer.course.run_state import Hooks
    from diffusionpipe.workflows.planning.job_profiles import CachedProfiles
    from diffusionpipe.workflows.planning.profile_cache import cache_folder
    from diffusionpipe.workflows.training.cache_worth import verdict_of_run
    from diffusionpipe.workflows.training.plan_memory import check_plan_memory
    from diffusionpipe.workflows.training.run_check import RunCheck
    from diffusionpipe.workflows.training.run_plan import make_plan
    from diffusionpipe.workflows.training.stated_values import stated_values

    member, recipe, device = part.member, part.recipe, part.device
    check = RunCheck(ConsoleReport(screen.console), part.command)
    report = RunReport(screen.console, member.rank, check)
    try:
        if recipe.training.deterministic:
            be_deterministic(os.environ)
        with ExitStack() as stack:
            with screen.work("waiting for all ranks"):
                job = stack.enter_context(joined(member, device=device, patience=recipe.run.patience))
                job.agree("the recipe", recipe.model_dump_json())
            hooks = Hooks(
                make_plan=make_plan,
                make_cutting=cutting_of,
                check_plan=check_plan_memory,
                save_grid=_save_grid,
                profiles=CachedProfiles(folder=cache_folder(os.environ)) if part.uses_cache else None,
                screen=screen,
                judge=check,
                judge_cache=verdict_of_run,
                stated=stated_values(part.command.recipe, part.command.overrides, recipe),
                settled=report.settle,
                tell_data=report.data,
                announce=report.start,
            )
            steps = run(recipe, job, hooks, resume=part.resume, take_over=part.take_over)
    except KeyboardInterrupt as error:
        leave(error, member)
    except Exception as error:
        report.explain(error)
        if member.world_size == 1 and not member.is_launched:
            if text := out_of_memory(error):
                raise TrainingError(text) from error
            raise
        leave(error, member)
    recipe = report.recipe or recipe
    if steps < recipe.training.num_steps:
        _end_stopped()
    if member.rank == 0:
        with screen.work("drawing results"):
            _draw_results(recipe)
        report.end()
        _name_results(recipe.run.folder)


def _end_stopped() -> NoReturn:
    """End this rank with the status that means "stopped, not finished"."""
    import signal

    from diffusionpipe.trainer.launching.exit_status import ExitStatus

    # The launcher or torchrun terminates the other ranks as soon as the first has ended with this status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise typer.Exit(ExitStatus.STOPPED)


def _save_grid(pictures: "Sequence[Picture]", captions: Sequence[str], path: Path) -> None:
    from diffusionpipe.viz.grid import sample_grid, square_columns

    sample_grid(list(zip(captions, pictures, strict=True)), path, columns=square_columns(len(pictures)))


def _draw_results(recipe: "Recipe") -> None:
    """The pictures of a finished run: loss curve, timeline, trace, and the last samples under a fixed name."""
    from diffusionpipe.files.output_file import write_atomically
    from diffusionpipe.viz.metrics import loss_curve
    from diffusionpipe.workflows.training.run_timeline import draw_timeline

    folder = recipe.run.folder
    if _is_due(folder / "loss.png", folder / "metrics.jsonl"):
        loss_curve(folder / "metrics.jsonl", folder / "loss.png")
    measured = folder / "timeline.json"
    if measured.exists() and (_is_due(folder / "timeline.png", measured) or _is_due(folder / "trace.json", measured)):
        draw_timeline(recipe)
    samples = sorted((folder / "samples").glob("step-*.png"))
    if samples and _is_due(folder / "samples.png", samples[-1]):
        write_atomically(folder / "samples.png", samples[-1].read_bytes())


def _is_due(picture: Path, source: Path) -> bool:
    """Whether a picture is not there, or older than the file that it shows."""
    return not picture.exists() or picture.stat().st_mtime_ns < source.stat().st_mtime_ns


RESULTS = {
    "samples.png": "",
    "loss.png": "",
    "timeline.png": "",
    "trace.json": " (open in ui.perfetto.dev)",
    "export": "/",
    "adapters": "/ (of each checkpoint)",
    "metrics.jsonl": "",
}
"""The files that a run may leave for people, each with a word on it."""


def _name_results(folder: Path) -> None:
    """Say what is there, and nothing else."""
    found = [f"{name}{word}" for name, word in RESULTS.items() if (folder / name).exists()]
    typer.echo(f"Results in {folder}: {', '.join(found)}")

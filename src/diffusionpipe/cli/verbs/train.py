"""`diffusionpipe train RECIPE`: start the ranks, or join the job that torchrun has started."""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffusionpipe.cli.text.screen import ConsoleScreen
    from diffusionpipe.workflows.training.job import TrainingJob
    from diffusionpipe.workflows.training.part import Part

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
    from diffusionpipe.workflows.training.part import part_of

    is_one = is_rank()
    screen = _screen_of(os.environ["RANK"] if is_one else "")
    with screen.work("starting"):  # torch takes seconds to import
        part = part_of(
            recipe,
            overrides or (),
            device=device,
            ranks=ranks,
            resume=resume,
            take_over=take_over,
            uses_cache=cache,
        )
    used = part.used
    if is_one:
        _refuse_launch_options(ranks, port, max_restarts)
        _take_place(part, screen)
        return
    if left_out := [str(number) for number in range(part.command.ranks) if number not in used]:
        logger.info("left out, as pipeline.use asks: %s", ", ".join(left_out))
    # One rank needs no launcher, unless something may have to restart it.
    if len(used) == 1 and port is None and not max_restarts:
        _join(replace(part, member=replace(part.member, local_rank=used[0])), screen)
        return
    job = TrainingJob(
        recipe=recipe,
        overrides=overrides or (),
        folder=part.recipe.run.folder,
        devices=used,
        device=device,
        resume=part.resume,
        take_over=take_over,
        port=port,
        max_restarts=max_restarts,
        uses_cache=cache,
    )
    _launch(job, part)


def _screen_of(number: str) -> "ConsoleScreen":
    """The screen of the rank with this number, "" for a process without a rank; the log goes there from now on."""
    from rich.console import Console

    from diffusionpipe.cli.text.screen import ConsoleScreen
    from diffusionpipe.cli.verbs.output import log_to

    rank = int(number) if number.isdecimal() else None  # `membership` refuses any other
    screen = ConsoleScreen(Console(stderr=True), speaks=not rank)
    log_to(screen.console, rank)
    return screen


def _take_place(part: "Part", screen: "ConsoleScreen") -> None:
    """Train as one of the ranks that `pipeline.use` leaves, with the number that this process has among them.

    A process that is left out logs it and returns.
    """
    from diffusionpipe.workflows.training.part import placed

    own = placed(part)
    if own is None:
        logger.warning("left out, as pipeline.use asks: ranks %s train", ", ".join(map(str, part.used)))
        return
    # Its log names the rank that it is from now on.
    if own.member.rank != part.member.rank:
        screen = _screen_of(str(own.member.rank))
    _join(own, screen)


def _launch(job: "TrainingJob", part: "Part") -> None:
    """Start the ranks of the job, wait for their end, and end this process with their exit status if it is not 0."""
    from diffusionpipe.workflows.training.job import check_start, signal_of, start

    check_start(job, part.recipe)
    logger.info("starting ranks=%d run=%s", len(job.devices), job.folder)
    if not (status := start(job)):
        return
    if name := signal_of(status):
        logger.warning("ended at once, no new checkpoint was saved signal=%s exit_status=%d", name, status)
    raise typer.Exit(status)


def _refuse_launch_options(ranks: int | None, port: int | None, max_restarts: int) -> None:
    from diffusionpipe.errors import ConfigError

    if max_restarts:
        raise ConfigError("torchrun restarts the ranks itself: give --max-restarts to torchrun, before the program")
    if ranks is not None or port is not None:
        raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")


def _join(part: "Part", screen: "ConsoleScreen") -> None:
    """Run this process as one rank of the job, from the first rendezvous to the last picture."""
    from diffusionpipe.cli.text.check_text import ConsoleReport
    from diffusionpipe.cli.text.run_text import ConsoleWords
    from diffusionpipe.workflows.training.part import draw_results, train_as_rank

    end = train_as_rank(part, screen, ConsoleWords(screen.console), ConsoleReport(screen.console))
    if end.status:
        # The launcher or torchrun terminates the other ranks as soon as the first has ended with this status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise typer.Exit(end.status)
    # The files are in the run's folder, which all ranks share.
    if part.member.rank == 0:
        with screen.work("drawing results"):
            draw_results(end.recipe)
        end.report.end()
        _name_results(end.recipe.run.folder)


RESULTS = {
    "samples.png": "",
    "loss.png": "",
    "timeline.png": "",
    "trace.json": " (open in ui.perfetto.dev)",
    "export": "/",
    "adapters": "/ (of each checkpoint)",
    "metrics.jsonl": "",
}
"""Name of each file or folder of results that a run may leave -> the text shown after the name."""


def _name_results(folder: Path) -> None:
    """Print a line with the names of the results that the run's folder has."""
    found = [f"{name}{word}" for name, word in RESULTS.items() if (folder / name).exists()]
    typer.echo(f"Results in {folder}: {', '.join(found)}")

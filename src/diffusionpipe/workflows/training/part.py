"""The part of a process in a training: its recipe and place among the ranks, and the run as one of them."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.membership import Membership
    from diffusionpipe.trainer.inference.drawing import Picture
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.reporting.screen import Screen
    from diffusionpipe.workflows.training.run_check import CheckReport, Command, RunCheck
    from diffusionpipe.workflows.training.run_report import RunReport, RunWords

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of this process in a training, as a rank or as the launcher of ranks."""

    recipe: "Recipe"
    resume: str | None
    """The value of --resume: a checkpoint or "auto", which it also is after a restart; None for a new run."""
    command: "Command"
    """How the training was started, with the number of ranks before `pipeline.use` leaves some out."""
    used: Sequence[int]
    """The ranks that train, which ascend."""
    member: "Membership"
    """The rank of this process, and the number of ranks."""
    take_over: bool
    """Whether the run takes its folder from a job that gives no sign of life."""
    uses_cache: bool
    """Whether kept profiles may be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a training on one rank."""

    status: int
    """The exit status, 0 where the last step is done; see `ExitStatus`."""
    recipe: "Recipe"
    """The recipe by which the run trained."""
    report: "RunReport"


def part_of(
    recipe: Path,
    overrides: Sequence[str],
    *,
    device: str,
    ranks: int | None,
    resume: str | None,
    take_over: bool,
    uses_cache: bool,
) -> Part:
    """The part of this process in the training of a recipe with overrides.

    `ranks`: the number of ranks to start; None for one for each GPU, or one rank without GPUs.

    Raises:
        ConfigError: the recipe cannot be trained, or the environment of a rank states no place in a job.
    """
    from diffusionpipe.runtime.job.membership import Membership, membership
    from diffusionpipe.trainer.course.resuming import resume_of_attempt
    from diffusionpipe.trainer.recipe import load_recipe, ranks_that_train
    from diffusionpipe.workflows.ranks import is_rank
    from diffusionpipe.workflows.training.recipe_checks import checks_of_run
    from diffusionpipe.workflows.training.run_check import Command

    is_one = is_rank()
    member = membership(os.environ) if is_one else Membership()
    count = member.world_size if is_one else ranks or default_ranks(device)
    if (restarted := resume_of_attempt(resume, member.attempt)) != resume:
        resume = restarted
        logger.info("restarted=%d resume=%s", member.attempt, resume)
    checks = checks_of_run(count, resume, all_train=member.is_launched)
    loaded = load_recipe(recipe, overrides, checks)
    # A launched rank does not know how many were asked for. We assume the fewest that the recipe's keys allow.
    started = max([count, *(rank + 1 for rank in loaded.pipeline.use)]) if member.is_launched else count
    return Part(
        recipe=loaded,
        resume=resume,
        command=Command(recipe=recipe, overrides=overrides, ranks=started, device=device),
        used=ranks_that_train(loaded.pipeline, started),
        member=member,
        take_over=take_over,
        uses_cache=uses_cache,
    )


def default_ranks(device: str) -> int:
    """The number of ranks of a training that states none: one for each GPU, or one without GPUs or on a CPU.

    `device`: the value of `--device`.
    """
    import torch

    return max(1, torch.cuda.device_count()) if device != "cpu" else 1


def train_as_rank(part: Part, screen: "Screen", words: "RunWords", checked: "CheckReport") -> End:
    """Run this process as one rank of the job, from the first rendezvous to the last step or a request to stop.

    `words`, `checked`: show the run's facts and the check of its prediction.

    Raises:
        TrainingError: the only rank of the job has too little memory.
        SystemExit: this rank, or another one, has failed; the text is on stderr or in the job's files.
    """
    from diffusionpipe.errors import TrainingError
    from diffusionpipe.runtime.job.process_group import leave
    from diffusionpipe.runtime.machine.error_file import out_of_memory
    from diffusionpipe.trainer.launching.exit_status import ExitStatus
    from diffusionpipe.workflows.training.run_check import RunCheck
    from diffusionpipe.workflows.training.run_report import RunReport

    member = part.member
    check = RunCheck(checked, part.command)
    report = RunReport(words, member.rank, check)
    try:
        steps = _train(part, screen, report, check)
    except KeyboardInterrupt as error:
        leave(error, member)
    except Exception as error:
        report.explain(error)
        # No other rank waits for the only one, so its error goes the usual way.
        if member.world_size == 1 and not member.is_launched:
            if text := out_of_memory(error):
                raise TrainingError(text) from error
            raise
        leave(error, member)
    recipe = report.recipe or part.recipe
    status = ExitStatus.STOPPED if steps < recipe.training.num_steps else ExitStatus.FINISHED
    return End(status=status, recipe=recipe, report=report)


def placed(part: Part) -> Part | None:
    """The part with this process's number among the used ranks; None where `pipeline.use` leaves it out.

    Raises:
        ConfigError: the process that keeps the job's store would end with the ranks that are left out.
    """
    from diffusionpipe.workflows.training.used_ranks import place_among

    member = place_among(part.member, part.used, os.environ)
    return None if member is None else replace(part, member=member)


def _train(part: Part, screen: "Screen", report: "RunReport", check: "RunCheck") -> int:
    """Join the job as this process's rank and train; returns the number of steps that the run has done."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.runtime.job.process_group import joined
    from diffusionpipe.runtime.machine.determinism import be_deterministic
    from diffusionpipe.trainer.course.run import run
    from diffusionpipe.trainer.course.run_state import Hooks
    from diffusionpipe.workflows.planning.job_profiles import CachedProfiles
    from diffusionpipe.workflows.planning.profile_cache import cache_folder
    from diffusionpipe.workflows.training.cache_worth import verdict_of_run
    from diffusionpipe.workflows.training.plan_memory import check_plan_memory
    from diffusionpipe.workflows.training.run_plan import make_plan
    from diffusionpipe.workflows.training.stated_values import stated_values

    recipe, command = part.recipe, part.command
    if recipe.training.deterministic:
        be_deterministic(os.environ)
    with ExitStack() as stack:
        with screen.work("waiting for all ranks"):
            job = stack.enter_context(joined(part.member, device=command.device, patience=recipe.run.patience))
            # Ranks on other machines may read another file under the same path.
            job.agree("the recipe", recipe.model_dump_json())
        cache = cache_folder(os.environ) if part.uses_cache else None
        hooks = Hooks(
            make_plan=make_plan,
            make_cutting=cutting_of,
            check_plan=partial(check_plan_memory, cache=cache),
            save_grid=_save_grid,
            profiles=CachedProfiles(folder=cache) if cache else None,
            screen=screen,
            judge=check,
            judge_cache=verdict_of_run,
            stated=stated_values(command.recipe, command.overrides, recipe),
            settled=report.settle,
            tell_data=report.data,
            announce=report.start,
        )
        return run(recipe, job, hooks, resume=part.resume, take_over=part.take_over)


def _save_grid(pictures: "Sequence[Picture]", captions: Sequence[str], path: Path) -> None:
    from diffusionpipe.viz.grid import sample_grid, square_columns

    sample_grid(list(zip(captions, pictures, strict=True)), path, columns=square_columns(len(pictures)))


def draw_results(recipe: "Recipe") -> None:
    """Write the pictures of a finished run: loss curve, timeline, trace, and the last samples under a fixed name.

    A picture that is newer than the file that it shows is left as it is.
    """
    from diffusionpipe.files.output_file import write_atomically
    from diffusionpipe.viz.metrics import loss_curve
    from diffusionpipe.workflows.training.run_timeline import draw_timeline

    folder = recipe.run.folder
    if _is_due(folder / "loss.png", folder / "metrics.jsonl"):
        loss_curve(folder / "metrics.jsonl", folder / "loss.png")
    measured = folder / "timeline.json"
    # A start without a recorded step writes no timeline.
    if measured.exists() and (_is_due(folder / "timeline.png", measured) or _is_due(folder / "trace.json", measured)):
        draw_timeline(recipe)
    samples = sorted((folder / "samples").glob("step-*.png"))
    if samples and _is_due(folder / "samples.png", samples[-1]):
        write_atomically(folder / "samples.png", samples[-1].read_bytes())


def _is_due(picture: Path, source: Path) -> bool:
    """Whether a picture is not there, or older than the file that it shows."""
    return not picture.exists() or picture.stat().st_mtime_ns < source.stat().st_mtime_ns

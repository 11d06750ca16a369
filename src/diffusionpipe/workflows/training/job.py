"""A training as a job of several processes: who may use its folder, and the command line of its ranks."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe import Recipe

_FEW = 8
"""The most ranks that start without a check of the model's layers: rank 0 checks them as soon as the launcher could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training to start with ranks on this machine: recipe, run folder, devices and options."""

    recipe: Path
    overrides: Sequence[str]
    folder: Path
    """The run folder."""
    devices: Sequence[int]
    """The number of each rank's device on this machine."""
    device: str
    """The kind of device: "auto", "cpu" or "cuda"."""
    resume: str | None
    """The value of --resume: a checkpoint or "auto"; None for a new run."""
    take_over: bool
    """Whether the job takes the run folder from a job that gives no sign of life."""
    port: int | None
    """The TCP port on which ranks connect; None for any free one."""
    max_restarts: int
    """How often the ranks are started again after a crash."""
    uses_cache: bool
    """Whether ranks may use kept profiles."""


def check_start(job: TrainingJob, recipe: "Recipe") -> None:
    """Refuse a job whose ranks could not train the recipe, as far as that can be seen before they start.

    Raises:
        ConfigError: this machine's device lacks the arithmetic, or its memory is too small for the processes; or the
            ranks are more than the model's layers can occupy.
    """
    from diffusionpipe.trainer.model.decisions import has_bfloat16
    from diffusionpipe.trainer.model.members import build_model
    from diffusionpipe.trainer.recipe import decided
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.machine import check_processes
    from diffusionpipe.workflows.training.run_plan import check_ranks

    if job.resume is None:  # a run that continues has the arithmetic that it began with
        decided(recipe, has_bfloat16=has_bfloat16(chosen_device(job.device)))
    # Of few ranks the first one finds it as early; many would be started for nothing.
    if len(job.devices) > _FEW:
        check_ranks(build_model(recipe, "cpu").model, recipe, len(job.devices))
    check_processes(len(job.devices), 1 if recipe.data.workers is None else recipe.data.workers)


def start(job: TrainingJob) -> int:
    """Start the job's ranks and wait for them; returns their exit status. No other job can use the run folder then.

    Raises:
        ConfigError: another job uses the folder, which is left as it is; or a rank has refused to start.
        PeerError: a rank has failed.
    """
    from diffusionpipe.errors import ConfigError, PeerError
    from diffusionpipe.trainer.checkpoints.checkpoint_folder import kept_of
    from diffusionpipe.trainer.launching.launch import LOGS, launch
    from diffusionpipe.trainer.launching.restarts import with_restarts
    from diffusionpipe.trainer.launching.run_lock import acquire

    with acquire(job.folder, take_over=job.take_over) as lock:
        lock.share()  # with rank 0, which outlives a launcher that is killed

        def attempt(resume: str | None) -> int:
            if lock.is_lost:
                raise ConfigError(f"another job has taken over {job.folder}, so this one is not restarted.")
            try:
                return launch(
                    [sys.executable, "-m", "diffusionpipe", *arguments_of_rank(job, resume)],
                    ranks=len(job.devices),
                    devices=job.devices,
                    log_folder=job.folder / LOGS,
                    environ=os.environ,
                    port=job.port,
                )
            except PeerError as error:
                # The remedy is looked up now: the failed attempt may have left new checkpoints.
                raise PeerError(f"{error}\n{kept_of(job.folder).remedy()}") from error

        return with_restarts(attempt, job.folder, job.resume, max_restarts=job.max_restarts)


def signal_of(status: int) -> str:
    """The name of the signal that has ended a training at once, without a new checkpoint; "" for any other status."""
    from diffusionpipe.trainer.launching.exit_status import ExitStatus, of_signal, signal_name

    return signal_name(status - of_signal(0)) if status > ExitStatus.STOPPED else ""


def arguments_of_rank(job: TrainingJob, resume: str | None) -> list[str]:
    """The arguments of our command line with which each rank is started; `resume`: the checkpoint, None for none."""
    options = ["--device", job.device, *(["--resume", resume] if resume is not None else [])]
    options += [] if job.uses_cache else ["--no-cache"]
    return ["train", str(job.recipe), *job.overrides, *options]

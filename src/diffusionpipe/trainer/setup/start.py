"""The facts about a run, before its first step: for the command line to show."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.loading import JobDataWorkers, Spread
from diffusionpipe.ir import Plan
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.cores import num_cores
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.data.batches.loading_time import batch_time
from diffusionpipe.trainer.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The facts about a run that are settled before its first step: plan, devices, samples, checkpoint."""

    recipe: Recipe
    model: ModelGraph
    plan: Plan
    hosts: tuple[str, ...]
    """The host name of each rank's machine."""
    devices: tuple[str, ...]
    """The name of each rank's device."""
    samples: int
    """The number of samples in the training data."""
    conditions: int
    """The number of training samples with a conditioning picture."""
    held_out: int | None
    """The number of samples in the validation data; None without validation."""
    step: int
    """The number of steps done before this start."""
    checkpoint: Path | None
    """The checkpoint from which the run continues; None if the run begins."""
    loading: JobDataWorkers | None = None
    """The data workers of the run and the cores of their machines; None if they need no cores of the ranks."""


def places(job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(host name of each rank, device name of each rank), by rank; every rank calls it."""
    text = form_of(str)
    return tuple(gather(socket.gethostname(), text)), tuple(gather(device_name(job.device), text))


def loading_of(job: Job, loader: StepLoader, hosts: Sequence[str]) -> JobDataWorkers | None:
    """The data workers of all ranks: machine, cores and time for a batch of each rank, for the prediction of a step.

    Every rank calls it, and all get the same. None on GPUs, whose hosts have cores to spare, and without data workers.
    """
    if job.device.type != "cpu" or not loader.workers:
        return None
    batches, cores = gather(batch_time(loader), form_of(Spread)), gather(num_cores(), form_of(int))
    return JobDataWorkers(machines=tuple(hosts), cores=tuple(cores), batches=tuple(batches), workers=loader.workers)

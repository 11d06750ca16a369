"""What a run is, before its first step: for the command line to show."""

import socket
from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.costs import ModelGraph
from diffusionpipe.ir import Plan
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.exchange import form_of, gather
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.trainer.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """All that is settled when training begins."""

    recipe: Recipe
    model: ModelGraph
    plan: Plan
    hosts: tuple[str, ...]
    """The machine of each rank."""
    devices: tuple[str, ...]
    """The device of each rank."""
    samples: int
    """In the training data."""
    conditions: int
    """Of them with a conditioning picture."""
    held_out: int | None
    """Samples in the validation data; None without any."""
    step: int
    """Steps done before."""
    checkpoint: Path | None
    """What the run goes on from; None where it begins."""


def places(job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Host and device of every rank; every rank calls it."""
    text = form_of(str)
    return tuple(gather(socket.gethostname(), text)), tuple(gather(device_name(job.device), text))

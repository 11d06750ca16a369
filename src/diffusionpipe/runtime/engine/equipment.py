"""The parts that an executor needs to run a schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from diffusionpipe.costs import TensorSpec
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.frozen import FillRunner
from diffusionpipe.runtime.compute.stage import StageModule
from diffusionpipe.runtime.weights.bringing import Brought
from diffusionpipe.runtime.weights.gradients import Reducible


def nothing() -> None:
    """Do nothing: the default for a function that is called after every iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """The parts with which an executor runs a schedule: modules of stages, transport, encoder, gradients."""

    stages: Mapping[int, StageModule]
    """Stage id -> the module that computes it, for the worker's trained stages."""
    tensors: Mapping[str, TensorSpec]
    """Name -> shape and dtype of every tensor that crosses stages and of every raw input."""
    transport: Transport
    device: torch.device
    rank_of_worker: Callable[[int], int] = lambda worker: worker
    """A function from a worker to its rank in this data-parallel group."""
    encoder: FillRunner | None = None
    """The object that runs the fills; None on a worker without fills."""
    raw_inputs: tuple[str, ...] = ()
    """The names of the tensors that may be put into the store before an iteration."""
    gradients: Mapping[int, Reducible] = field(default_factory=dict)
    """Block id -> the gradients that the schedule reduces."""
    brought: Mapping[int, Brought] = field(default_factory=dict)
    """Block id -> its weights, where UNSHARD prepares them and RESHARD releases them."""
    loss_scale: float = 1.0
    """The gradient of the step's loss for each sample's loss."""
    preparations: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    """Stage id -> a function that is called in every iteration before the stage's first forward."""
    cleanup: Callable[[], None] = nothing
    """A function that is called after every iteration."""

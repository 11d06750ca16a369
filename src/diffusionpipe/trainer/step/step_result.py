"""The results of a training step that are to be reported."""

from dataclasses import dataclass

from diffusionpipe.trainer.step.stopping import Decision
from diffusionpipe.trainer.step.trained_backbone import BackboneResult
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The loss, norms, learning rates and decision of one step, the same on all ranks but for the host's times."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Loss of all backbones together."""
    gradient_norm: float
    """Norm of the gradients of all backbones together."""
    learning_rate: float
    """Learning rate of the first backbone."""
    backbones: tuple[BackboneResult, ...]
    """The result of each backbone."""
    seconds: Seconds
    """The host's time for the step, without the wait for data."""
    decision: Decision
    """Whether all ranks save, stop or draw after the step."""
    waited: Seconds = 0.0
    """The host's wait for data within the step, where batches begin while others are in flight."""
    is_amended: bool = False
    """Whether a post-validated step was taken back, and done again with clipped gradients or skipped."""
    is_skipped: bool = False
    """Whether nothing was updated, because the step was a spike."""
    saving_votes: int = 0
    """The sum of all ranks' `Saves.vote`."""
    distance_rate: float | None = None
    """Prodigy's d x the learning rate, by which the update was scaled; None for other optimizers."""
    noise: tuple[float, float] | None = None
    """(|G|², tr S) of the gradient noise scale (see `noise_scale`); None if the step did not measure them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The device's time for the schedule of a step, and the idle fraction of all ranks in it."""

    step: int
    """Number of the step, as in its `StepResult`."""
    iteration: Seconds
    """The time for running the schedule; the rest of a step is sum over all ranks, clipping, optimizer and average."""
    bubble: float
    """The idle fraction of all ranks' time within the schedule."""

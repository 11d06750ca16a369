"""The parts of a run while it is under way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from diffusionpipe.ir import Timeline
from diffusionpipe.ir.data_survey import Line
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.trainer.checkpoints.run_checkpoints import RunCheckpoints
from diffusionpipe.trainer.course.caching import JudgeCache
from diffusionpipe.trainer.course.preparation import Data
from diffusionpipe.trainer.data.batches.sized import turns_at
from diffusionpipe.trainer.inference.drawing import Picture
from diffusionpipe.trainer.optim.named_rates import LossRates
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.metrics import MetricsWriter
from diffusionpipe.trainer.reporting.progress import TrainingProgress
from diffusionpipe.trainer.reporting.screen import NoScreen, Screen
from diffusionpipe.trainer.setup.job_profile import ProfileCache
from diffusionpipe.trainer.setup.planning import CheckPlan, MakeCutting, MakePlan, Planning
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.setup.start import Start
from diffusionpipe.trainer.step.cache_writer import CacheWriter
from diffusionpipe.trainer.step.not_finite import NamesOf
from diffusionpipe.trainer.step.spikes import Spikes
from diffusionpipe.trainer.step.stopping import Stopping
from diffusionpipe.units import Bytes


class PredictionMonitor(Protocol):
    """Compares the measured steps of a run with their prediction; on rank 0."""

    def check(self, recorded: Recorded, memory: Sequence[Bytes]) -> Mapping[str, float]:
        """Shows by how much the first steps differ, and returns numbers for the metrics.

        `memory`: bytes of each rank's device.
        """
        ...

    def give_up(self, steps: tuple[int, int], others: float) -> None:
        """Shows that steps `steps` (first, last) judge nothing: other programs used the part `others` of the cores."""
        ...

    def look(self) -> None:
        """Shows results of work in the background, if there are any; called after every step."""
        ...

    def close(self) -> None:
        """Ends the monitor, because training is over."""
        ...


SaveGrid = Callable[[Sequence[Picture], Sequence[str], Path], None]
"""`save_grid(pictures, captions, path)` writes a captioned grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions and settings that the command line or the library hands in: planning, screen, judges, drawing."""

    make_plan: MakePlan
    make_cutting: MakeCutting
    check_plan: CheckPlan | None = None
    """Refuses a plan file that does not fit in memory; None for no check."""
    save_grid: SaveGrid
    profiles: ProfileCache | None = None
    """The cache of profiles of other runs; None to measure always."""
    screen: Screen = field(default_factory=NoScreen)
    """The screen on which rank 0 shows the work under way."""
    judge: PredictionMonitor | None = None
    """The judge of the first steps; None: they are not judged. The same on all ranks, but only rank 0's is asked."""
    judge_cache: JudgeCache | None = None
    """Says on rank 0 the worth of a cache of encoders' results; None: nothing is said of it."""
    stated: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys that the command line sets for this start, with the values that the recipe's file has for them."""
    settled: Callable[[Recipe], None] | None = None
    """Called on every rank with the recipe with which the run continues."""
    tell_data: Callable[[Sequence[Line]], None] | None = None
    """Called on rank 0 with what is to be said of the data, before anything is measured; None to say nothing."""
    announce: Callable[[Start], None] | None = None
    """Called on every rank before the first step; None to say nothing of the run."""


def planning_of(hooks: Hooks, screen: Screen, data: Data, *, is_resumed: bool) -> Planning:
    """The planning functions of the hooks with the run's screen and shares of sizes, for `open_session`.

    `is_resumed`: the run keeps the plan in its folder.
    """
    return Planning(
        make_plan=hooks.make_plan,
        make_cutting=hooks.make_cutting,
        check_plan=hooks.check_plan,
        shelf=hooks.profiles,
        screen=screen,
        shares=() if data.sizes is None else data.sizes.shares,
        is_resumed=is_resumed,
    )


@dataclass(kw_only=True)
class RunState:
    """All parts of a run under way on one rank: session, data, step, metrics, checkpoints and signals."""

    session: Session
    hooks: Hooks
    screen: Screen
    data: Data
    cache: CacheWriter | None
    """Keeps results of encoders; None where the recipe keeps none."""
    stopping: Stopping
    metrics: MetricsWriter | None
    """The writer of the metrics on rank 0; None on the others."""
    kept: Mapping[str, object]
    """The facts about the run in its checkpoints: its identity and its recipe."""
    spikes: Spikes
    loss_rates: LossRates
    checkpoints: RunCheckpoints
    progress: TrainingProgress | None = None
    """The progress that rank 0 shows; None on the others."""
    step: int = 0
    """The number of training steps done."""
    validated: int | None = None
    """The last step whose weights had a finite validation loss."""
    drawn: int | None = None
    """The last step whose weights were drawn."""
    timeline: Timeline | None = field(default=None)


def names_of(state: RunState) -> NamesOf:
    """A function (step, positions in the batch) that returns each sample's number and file name for messages."""
    source = state.data.train
    samples = source.dataset.samples

    def names(step: int, positions: Sequence[int]) -> tuple[str, ...]:
        batch = state.session.plan.batch
        turns = turns_at(source, state.data.sizes, batch=batch, step=step, positions=positions)
        return tuple(f"{turn.sample} ({samples[turn.sample].name})" for turn in turns)

    return names

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
    """Compares the measured steps of a run with their prediction, on rank 0."""

    def check(self, recorded: Recorded, memory: Sequence[Bytes]) -> Mapping[str, float]:
        """Shows by how much the first steps differ from their prediction, and returns numbers for the metrics, by name.

        `memory`: the usable bytes of each rank's device.
        """
        ...

    def give_up(self, steps: tuple[int, int], others: float) -> None:
        """Shows that the recorded steps judge nothing, because other programs used the cores.

        `steps`: the numbers of the first and the last recorded step. `others`: the part of the cores, from 0 to 1.
        """
        ...

    def look(self) -> None:
        """Shows results of its work in the background, if there are any; called after every step."""
        ...

    def close(self) -> None:
        """Ends its work in the background, because training is over."""
        ...


SaveGrid = Callable[[Sequence[Picture], Sequence[str], Path], None]
"""A function `save_grid(pictures, captions, path)` that writes a picture of all pictures with their captions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions and settings that the command line or the library hands in: planning, screen, judges, drawing."""

    make_plan: MakePlan
    """Makes the plan of the run."""
    make_cutting: MakeCutting
    """Makes the rule that cuts steps into micro-batches of unequal tokens."""
    check_plan: CheckPlan | None = None
    """Refuses a plan file that does not fit in memory; None for no check."""
    save_grid: SaveGrid
    """Writes the grid of the pictures that the run draws."""
    profiles: ProfileCache | None = None
    """The cache of profiles of other runs; None to measure always."""
    screen: Screen = field(default_factory=NoScreen)
    """The screen on which rank 0 shows the work under way."""
    judge: PredictionMonitor | None = None
    """The monitor that compares the first steps with their prediction, used on rank 0 alone; None for no comparison.
    All ranks must agree on whether there is one."""
    judge_cache: JudgeCache | None = None
    """Says on rank 0 whether a cache of encoders' results pays; None for no judgement."""
    stated: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys that the command line sets for this start, with the values that the recipe's file has for them."""
    settled: Callable[[Recipe], None] | None = None
    """Called on every rank with the recipe with which the run continues."""
    tell_data: Callable[[Sequence[Line]], None] | None = None
    """Called on rank 0 with remarks about the data, before anything is measured; None for no remarks."""
    announce: Callable[[Start], None] | None = None
    """Called on every rank before the first step with the facts about the run; None for no announcement."""


def planning_of(hooks: Hooks, screen: Screen, data: Data, *, is_resumed: bool) -> Planning:
    """The planning functions of the hooks with the run's screen and shares of sizes, for `open_session`.

    `is_resumed`: the run continues with the plan in its folder.
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
    """The writer of the cache of encoders' results; None where the recipe keeps none."""
    stopping: Stopping
    """The signals and files that ask the run to stop, save or draw."""
    metrics: MetricsWriter | None
    """The writer of the metrics on rank 0; None on the others."""
    kept: Mapping[str, object]
    """The entries about the run in state.json of its checkpoints: its identity and its recipe."""
    spikes: Spikes
    """The watch for spikes of the loss and the gradient norm."""
    loss_rates: LossRates
    """The learning rate scheduler that reacts to losses."""
    checkpoints: RunCheckpoints
    progress: TrainingProgress | None = None
    """The progress that rank 0 shows; None on the others."""
    step: int = 0
    """The number of training steps done."""
    validated: int | None = None
    """The last step whose weights had a finite validation loss."""
    drawn: int | None = None
    """The last step with whose weights samples were drawn."""
    timeline: Timeline | None = field(default=None)
    """The timeline of a typical one of the last steps; None until the run has ended."""


def names_of(state: RunState) -> NamesOf:
    """A function (step, positions in the batch) that returns each sample's number and file name, for messages."""
    source = state.data.train
    samples = source.dataset.samples

    def names(step: int, positions: Sequence[int]) -> tuple[str, ...]:
        batch = state.session.plan.batch
        turns = turns_at(source, state.data.sizes, batch=batch, step=step, positions=positions)
        return tuple(f"{turn.sample} ({samples[turn.sample].name})" for turn in turns)

    return names

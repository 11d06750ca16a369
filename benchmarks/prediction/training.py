"""Training by the trainer's own parts on two ranks, every step timed from a common start."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.prediction.held import NotingTransport, count_held
from benchmarks.prediction.plans import BATCH_SIZES
from diffusionpipe.costs import Profile
from diffusionpipe.costs.graph import as_fraction
from diffusionpipe.ir import Plan, Span
from diffusionpipe.models.opening.folder import resolve_folder, weight_sources
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.profiler import profile_job, profile_model
from diffusionpipe.runtime.comm.places import channels_of, holders_of, trained_layers
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.cores import cpu_wait_time
from diffusionpipe.trainer.course.counted_steps import MOST_ROUNDS, representative_steps
from diffusionpipe.trainer.course.first_steps import OwnSteps, StepRecorder
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.data.scan.dataset import Condition, scan
from diffusionpipe.trainer.data.text.tokens import TOKENS
from diffusionpipe.trainer.inference.conditions import open_tokenizer
from diffusionpipe.trainer.model.members import build_model
from diffusionpipe.trainer.model.parameter_groups import parameter_groups
from diffusionpipe.trainer.optim.optimizer import build_optimizer
from diffusionpipe.trainer.recipe import Recipe, load_recipe
from diffusionpipe.trainer.setup.job_profile import update_of
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.trainer.step.stopping import Stopping
from diffusionpipe.units import Bytes, Seconds

WARM_UP = 3
UNRECORDED, RECORDED = 5, 15
"""The first steps of a plan, as in a run: these 20, or more where few count, correct the profile for those behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step of one rank."""

    spans: tuple[Span, ...]
    iteration: Seconds
    """Of the schedule, from the common start to the end on this rank."""
    step: Seconds
    """With the agreement of the ranks, clipping, optimizer and average."""
    delay: Seconds
    """Of it, ready to run but without a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """What the predictions are made from."""

    alone: Profile
    """Measured by rank 0 while the other waited, links and update unknown."""
    together: Profile


def measure_profiles(job: Job, recipe: Path, overrides: tuple[str, ...]) -> Profiles:
    """Both profiles; the same on all ranks."""
    loaded = load_recipe(recipe, overrides)
    opened = build_model(loaded, "cpu")
    graph, model = opened.graph, opened.model
    alone: list[Profile | None] = [None]
    if job.membership.rank == 0:
        alone = [profile_model(graph, model, batch_sizes=BATCH_SIZES, repeats=3)]
    dist.broadcast_object_list(alone, src=0)
    assert alone[0] is not None
    together = profile_job(job, graph, model, batch_sizes=BATCH_SIZES, make_update=partial(update_of, loaded))
    return Profiles(alone=alone[0], together=together)


def measure_joint_profile(job: Job, recipe: Path, overrides: tuple[str, ...]) -> Profile:
    """The profile of all ranks alone, as a run measures it."""
    loaded = load_recipe(recipe, overrides)
    opened = build_model(loaded, "cpu")
    make_update = partial(update_of, loaded)
    return profile_job(job, opened.graph, opened.model, batch_sizes=BATCH_SIZES, make_update=make_update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank did with one plan."""

    first: OwnSteps
    """The steps that correct the profile,"""
    recorded: int
    """out of so many."""
    traces: list[StepTrace]
    """Those after them."""
    held: Bytes
    """At its peak."""


def train(
    job: Job, recipe: Path, overrides: tuple[str, ...], plans: Mapping[str, Plan], num_steps: int
) -> dict[str, Report]:
    """For each plan what this rank did."""
    loaded = load_recipe(recipe, overrides)
    runs = {name: _Training(job, loaded, plan) for name, plan in plans.items()}
    held = {name: run.held for name, run in runs.items()}
    reports: dict[str, Report] = {}
    for name, run in runs.items():
        first = run.first()
        traces = [run.traced() for _ in range(num_steps)]
        reports[name] = Report(first=first, recorded=run.recorder.num_steps, traces=traces, held=held[name])
    return reports


class _Training:
    """One plan in training on one rank, always on the same batch, so that no data loader runs beside it."""

    def __init__(self, job: Job, recipe: Recipe, plan: Plan) -> None:
        folder = resolve_folder(recipe.model.path)
        transport = NotingTransport(ProcessTransport(job.device, summing=tuple(holders_of(plan).values())))
        self._session = _session(job, recipe, folder, plan, transport)
        worker = self._session.worker
        self._inputs = _batch(self._session, folder)
        self._number = 0
        stopping = Stopping(folder=None)
        self._stepper = Stepper(self._session, stopping, lambda step, positions: ())
        if worker.prologue is not None:
            worker.feed(worker.prologue, self._inputs)
            worker.prologue.run()
        for _ in range(WARM_UP):
            self.step()
        worker.reset_gradients()
        worker.feed(worker.train, self._inputs)
        self.held = count_held(worker, self._session.graph, transport)
        self.recorder = StepRecorder(self._session)

    def step(self) -> None:
        """One step."""
        self._stepper.step(self._number, self._inputs)
        self._number += 1

    def first(self) -> OwnSteps:
        """The first steps, as a run makes and records them (`trainer.course.first_steps.FirstSteps`)."""
        for _ in range(UNRECORDED):
            self.step()
        while True:
            for _ in range(RECORDED):
                self.recorder.begin()
                self.step()
                self.recorder.end(max(phase.end for phase in self._stepper.phases()))
            counted = representative_steps(self.recorder.notes())
            is_last = self.recorder.num_steps >= MOST_ROUNDS * RECORDED
            if is_last or not counted.why_more:
                # Where a run would judge nothing, the benchmark shows what it would get wrong.
                return self.recorder.own(counted.steps or range(self.recorder.num_steps))

    def traced(self) -> StepTrace:
        """One step with its times, from a start that all ranks share."""
        dist.barrier()
        start, waited = perf_counter(), cpu_wait_time()
        self.step()
        seconds, waited = perf_counter() - start, cpu_wait_time() - waited
        spans, iteration = self._session.worker.train.recording.spans()
        return StepTrace(spans=spans, iteration=iteration, step=seconds, delay=waited)


def _session(job: Job, recipe: Recipe, folder: Path, plan: Plan, transport: NotingTransport) -> Session:
    """What `trainer.setup.session.open_session` makes, with a plan and a transport that are given."""
    opened = build_model(recipe, job.device.type)
    graph, model = opened.graph, opened.model
    rank = job.membership.rank
    sources = weight_sources(folder, graph, from_scratch=True)
    layers = {*trained_layers(plan, rank), *model.frozen_layers}
    materialize(graph, layers, sources, device=job.device, dtype=torch.float32, seed=recipe.training.seed)
    ProcessTransport(job.device).warm_up(channels_of(plan))
    worker = build_worker(graph, model, plan, rank, transport, device=job.device)
    settings, groups = recipe.optimizer, parameter_groups(recipe, model)
    return Session(
        recipe=recipe,
        job=job,
        members=opened.members,
        graph=graph,
        model=model,
        others=opened.others,
        plan=plan,
        transport=transport,
        worker=worker,
        optimizer=build_optimizer(settings.name, worker.parameters, settings.learning_rate, settings.arguments),
        groups=groups,
        ema=groups.average(worker.parameters, None),
        in_backward=None,
    )


def _batch(session: Session, folder: Path) -> dict[str, torch.Tensor]:
    """The raw inputs that this rank encodes in the first step."""
    names = session.model.inputs
    source = BatchSource(
        dataset=scan(next(iter(session.recipe.data.folders.values())), Condition.TEXT),
        inputs=session.graph.inputs,
        seed=session.recipe.training.seed,
        tokenizers={name: open_tokenizer(folder, name) for name in TOKENS if name in names},
        null_label=None,
        augmentation=Augmentation(self_conditioning=as_fraction(session.recipe.objective.self_conditioning)),
    )
    loader = StepLoader(
        source=source, batch=session.plan.batch, positions=session.positions, first_step=0, num_steps=1, workers=0
    )
    return loader.load(0)

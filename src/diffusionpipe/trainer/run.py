"""A training run from beginning to end on one rank.

    recipe ─> session ─> [checkpoint] ─> steps: train, validate, draw, save ─> last checkpoint ─> export ─> timeline

What is drawn and how a plan is made comes from above (`Hooks`), because the execution half knows neither pictures nor
planning.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from diffusionpipe.errors import CheckpointError, ConfigError, PeerError
from diffusionpipe.ir import Span, Timeline
from diffusionpipe.ir.files import write_plan, write_timeline
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.trainer.batch import TOKENS, Augmentation, BatchSource, sample_indices
from diffusionpipe.trainer.checkpoint import clean, latest, resolve, save
from diffusionpipe.trainer.dataset import Condition, Dataset, scan
from diffusionpipe.trainer.drawing import Picture, Wish, draw_in_session, null_label, open_tokenizer, raw_conditions
from diffusionpipe.trainer.evaluation import averaged, validate
from diffusionpipe.trainer.export import export, sampling_scheduler
from diffusionpipe.trainer.job_profile import ProfileShelf
from diffusionpipe.trainer.kept_samples import keep_in_session, sample_folder
from diffusionpipe.trainer.loader import StepLoader
from diffusionpipe.trainer.loop import Stepper, StepResult
from diffusionpipe.trainer.metrics import MetricsWriter
from diffusionpipe.trainer.progress import TrainingProgress
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe_file import recipe_to_toml
from diffusionpipe.trainer.run_export import export_settings
from diffusionpipe.trainer.sampling import SamplingSettings, build_scheduler
from diffusionpipe.trainer.session import MakePlan, Session, check_resumed, open_session, run_identity
from diffusionpipe.trainer.shared_file_system import check_shared_file_system
from diffusionpipe.trainer.stopping import Stopping
from diffusionpipe.trainer.trackers import check_trackers, open_trackers
from diffusionpipe.trainer.training_state import load_training, training_tensors
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

NUM_TRACED = 15
"""Last steps of a run of which one, of median length, becomes the run's timeline."""

SaveGrid = Callable[[Sequence[Picture], Sequence[str], Path], None]
"""`save_grid(pictures, captions, path)` writes a captioned grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the command line hands in."""

    make_plan: MakePlan
    save_grid: SaveGrid
    profiles: ProfileShelf | None = None
    """Where profiles of other runs are; None to measure always."""


@dataclass(kw_only=True)
class _Run:
    """One run under way on one rank."""

    session: Session
    hooks: Hooks
    train: Dataset
    source: BatchSource
    validation: BatchSource | None
    stopping: Stopping
    metrics: MetricsWriter | None
    """On rank 0."""
    identity: Mapping[str, object]
    """What the checkpoints say about the run."""
    progress: TrainingProgress | None = None
    """On rank 0."""
    step: int = 0
    """Steps done."""
    saved: int | None = None
    """The step of the last checkpoint of this process."""
    timeline: Timeline | None = field(default=None)


def run(recipe: Recipe, job: Job, hooks: Hooks, *, resume: str | None = None) -> int:
    """Train as the recipe says and return the number of steps done, fewer than asked after a signal.

    Every rank of the job calls it with the same arguments. Results stand in the run's folder.

    Raises:
        ConfigError: the recipe, the data, the model or the checkpoint cannot be used; nothing long has started.
        NonFiniteLossError: the loss is not finite.
        PeerError: another rank died.
    """
    folder = recipe.run.folder
    if job.membership.rank == 0:
        check_trackers(recipe)
    _prepare_folder(folder, job, resume)
    session = open_session(recipe, job, hooks.make_plan, hooks.profiles)
    _check_sampling(session)
    train, held_out = _scan_data(session)
    source = _source(session, train, augmentation=_augmentation(recipe))
    stopping = Stopping(folder=folder if session.is_first else None, peer_failure=lambda: _peer_failure(job))
    with stopping.listening():
        state = _Run(
            session=session,
            hooks=hooks,
            train=train,
            source=source,
            validation=_source(session, held_out, augmentation=Augmentation()) if held_out else None,
            stopping=stopping,
            metrics=None,
            identity=run_identity(session, train),
        )
        if resume is not None:
            loaded = load_training(resolve(folder, resume), session.state)
            state.step = check_resumed(loaded, state.identity, recipe.training.steps)
        if session.is_first:
            _write_documents(session)
            resume_step = state.step if resume is not None else None
            state.metrics = MetricsWriter(folder, resume_step, open_trackers(recipe, resume_step))
            state.progress = TrainingProgress(
                num_steps=recipe.training.steps, first_step=state.step, batch=session.plan.batch
            )
        try:
            _train(state)
        finally:
            if state.metrics is not None:
                state.metrics.close()
        if state.saved != state.step:
            _save(state)
    if state.step == recipe.training.steps:
        _finish(state)
    return state.step


def _peer_failure(job: Job) -> PeerError | None:
    """The death of another rank that the watchdog knows of."""
    verdict = job.watchdog.verdict
    return PeerError(verdict.message(job.membership.rank)) if verdict is not None else None


def _prepare_folder(folder: Path, job: Job, resume: str | None) -> None:
    """Refuse to mix two runs in one folder; remove what an interrupted save has left."""
    first = job.membership.rank == 0
    problem: list[str | None] = [None]
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
            if resume is not None:
                resolve(folder, resume)
            elif latest(folder) is not None:
                problem[0] = (
                    f"{folder} holds the checkpoints of an earlier run; go on with --resume latest, or choose another "
                    "run.folder, or delete it"
                )
        except (CheckpointError, OSError) as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise CheckpointError(problem[0]) if resume is not None else ConfigError(problem[0])
    check_shared_file_system(folder)


def _scan_data(session: Session) -> tuple[Dataset, Dataset | None]:
    """Both folders, scanned and checked on rank 0."""
    recipe = session.recipe
    need = Condition.LABEL if "labels" in session.model.inputs else Condition.TEXT
    found: list[Dataset | ConfigError | None] = [None, None]
    if session.is_first:
        try:
            found[0] = scan(recipe.data.train, need)
            if recipe.data.validation is not None:
                found[1] = scan(recipe.data.validation, need)
        except ConfigError as error:
            found = [error, None]
    dist.broadcast_object_list(found, src=0)
    train, held_out = found
    if isinstance(train, ConfigError):
        raise train
    assert isinstance(train, Dataset)
    assert not isinstance(held_out, ConfigError)
    return train, held_out


def _check_sampling(session: Session) -> None:
    """Refuse before the first step what could not be drawn later.

    Raises:
        RecipeError: the prompts or labels do not suit the model, or there is no such scheduler.
    """
    if session.recipe.sampling.every is not None:
        settings = sampling_settings(session)
        raw_conditions(_wish(session.recipe), session.graph, session.folder, is_guided=settings.is_guided)
        build_scheduler(settings.scheduler, settings.scheduler_class)


def _wish(recipe: Recipe) -> Wish:
    drawn = recipe.sampling
    return Wish(prompts=drawn.prompts, labels=drawn.labels, negatives=drawn.negatives)


def _augmentation(recipe: Recipe) -> Augmentation:
    return Augmentation(
        random_crop=recipe.data.random_crop, flip=recipe.data.flip, condition_dropout=recipe.data.caption_dropout
    )


def _source(session: Session, dataset: Dataset, *, augmentation: Augmentation) -> BatchSource:
    names = session.model.inputs
    tokenizers = {name: open_tokenizer(session.folder, name) for name in TOKENS if name in names}
    return BatchSource(
        dataset=dataset,
        inputs=session.graph.inputs,
        seed=session.recipe.training.seed,
        tokenizers=tokenizers,
        null_label=null_label(session.graph) if "labels" in names else None,
        augmentation=augmentation,
    )


def _write_documents(session: Session) -> None:
    """The resolved recipe and the plan, for people and for `diffusionpipe sample`."""
    folder = session.recipe.run.folder
    (folder / "recipe.toml").write_text(recipe_to_toml(session.recipe), encoding="utf-8")
    write_plan(session.plan, folder / "plan.json")


def _train(state: _Run) -> None:
    session, recipe = state.session, state.session.recipe
    loader = StepLoader(
        source=state.source,
        batch=session.plan.batch,
        positions=session.positions,
        first_step=state.step,
        num_steps=recipe.training.steps - state.step + session.worker.encodes_ahead,
        workers=recipe.data.workers,
        pin_memory=session.job.device.type == "cuda",
    )

    def names_of(step: int, positions: Sequence[int]) -> tuple[str, ...]:
        indices = sample_indices(
            len(state.train.samples),
            seed=recipe.training.seed,
            batch=session.plan.batch,
            step=step,
            positions=positions,
        )
        return tuple(f"{index} ({state.train.samples[index].name})" for index in indices)

    stepper = Stepper(session, state.stopping, names_of)
    traces: list[tuple[tuple[Span, ...], Seconds]] = []
    waits: dict[int, Seconds] = {}
    with closing(iter(loader)) as batches, state.progress or nullcontext():
        if (first := session.worker.prologue) is not None:
            session.worker.feed(first, next(batches))
            first.run()
        while state.step < recipe.training.steps:
            started = perf_counter()
            inputs = next(batches)
            waited = perf_counter() - started
            is_traced = state.step >= recipe.training.steps - NUM_TRACED
            if is_traced:
                dist.barrier()  # so that the ranks' clocks start together in the timeline that is kept
            waits[state.step + 1] = waited
            results = stepper.step(state.step, inputs)
            state.step += 1
            if is_traced:
                traces.append(session.worker.train.spans())
            if _needs_final_weights(state, results):
                results += stepper.settle()
            for result in results:
                _report(state, result, waits.pop(result.step))
            _evaluate(state)
            if any(result.decision.saves for result in results) or _is_due(recipe.checkpoint.every, state.step):
                _save(state)
            if state.progress is not None:
                state.progress.pause()
            if any(result.decision.stops for result in results):
                logger.warning("stopped step=%d reason=signal", state.step)
                break
    if traces and state.step == recipe.training.steps:
        state.timeline = _measured_timeline(session, traces)


def _needs_final_weights(state: _Run, results: Sequence[StepResult]) -> bool:
    """Whether the weights are read outside of training after this step."""
    recipe = state.session.recipe
    wanted = (recipe.checkpoint.every, recipe.validation.every, recipe.sampling.every, recipe.training.steps)
    decided = any(result.decision.saves or result.decision.stops for result in results)
    return decided or any(_is_due(every, state.step) for every in wanted)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _report(state: _Run, result: StepResult, waited: float) -> None:
    if state.metrics is None or state.progress is None:
        return
    step_s = result.seconds + waited
    state.progress.update(result.step - 1, {"loss": result.loss, "step_s": step_s, "bubble": result.bubble})
    state.metrics.write(
        result.step,
        {
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "step_s": step_s,
            "data_s": waited,
            "samples_per_s": state.session.plan.batch / step_s,
            "bubble": result.bubble,
            **({"amended": 1.0} if result.is_amended else {}),
        },
    )


def _evaluate(state: _Run) -> None:
    """Validation and pictures, where they are due."""
    session, recipe = state.session, state.session.recipe
    is_last = state.step == recipe.training.steps
    if state.validation is not None and (_is_due(recipe.validation.every, state.step) or is_last):
        result = validate(session, state.validation)
        if state.metrics is not None:
            logger.info("step=%d validation_loss=%.5f", state.step, result.loss)
            by_time = {f"validation_loss_t{time:g}": loss for time, loss in result.by_time}
            state.metrics.write(state.step, {"validation_loss": result.loss, **by_time})
    if recipe.sampling.every is not None and (_is_due(recipe.sampling.every, state.step) or is_last):
        wish, settings = _wish(recipe), sampling_settings(session)
        with averaged(session):
            pictures = draw_in_session(session, wish, settings)
        if pictures is not None:
            assert state.metrics is not None, "the first worker shows the pictures, which is rank 0"
            shown = keep_in_session(session, state.step, pictures, wish, settings)
            state.metrics.show(state.step, shown)
            grid = sample_folder(recipe.run.folder, state.step).with_suffix(".png")
            state.hooks.save_grid(pictures, wish.captions, grid)


def sampling_settings(session: Session) -> SamplingSettings:
    """How the run draws samples: with the scheduler that its export will have."""
    recipe = session.recipe
    return SamplingSettings(
        steps=recipe.sampling.steps,
        guidance=recipe.sampling.guidance,
        seed=recipe.training.seed if recipe.sampling.seed is None else recipe.sampling.seed,
        scheduler=sampling_scheduler(session.folder, session.prediction, recipe.objective.shift),
        scheduler_class=recipe.sampling.scheduler,
    )


def _save(state: _Run) -> None:
    session = state.session
    save(
        session.recipe.run.folder,
        state.step,
        training_tensors(session.state),
        {"step": state.step, **state.identity},
        keep=session.recipe.checkpoint.keep,
    )
    state.saved = state.step


def _measured_timeline(session: Session, traces: Sequence[tuple[tuple[Span, ...], Seconds]]) -> Timeline:
    """Of the traced iterations the one of median length on rank 0, as the first pipeline ran it."""
    by_length = sorted(range(len(traces)), key=lambda index: traces[index][1])
    chosen = [by_length[len(traces) // 2]]
    dist.broadcast_object_list(chosen, src=0)
    spans, _ = traces[chosen[0]]
    gathered: list[tuple[Span, ...] | None] = [None] * session.plan.mesh.num_ranks
    dist.all_gather_object(gathered, spans if session.worker.place.group == 0 else ())
    merged = tuple(span for rank_spans in gathered if rank_spans for span in rank_spans)
    return Timeline(num_workers=session.plan.mesh.pipeline, spans=merged, source="measured")


def _finish(state: _Run) -> None:
    """Export and timeline, on rank 0; the others wait at the job's end."""
    session, recipe = state.session, state.session.recipe
    if not session.is_first:
        return
    folder = recipe.run.folder
    if state.timeline is not None:
        write_timeline(state.timeline, folder / "timeline.json")
    checkpoint = latest(folder)
    assert checkpoint is not None, "just saved"
    settings = export_settings(recipe, session.folder, session.model, session.prediction)
    export(checkpoint, folder / "export", settings)

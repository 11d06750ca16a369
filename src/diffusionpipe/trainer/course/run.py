"""A training run from beginning to end on one rank.

    recipe ─> session ─> [checkpoint] ─> steps: train, validate, draw, save ─> last checkpoint ─> export ─> timeline

Drawing and planning come from above (`Hooks`), because the execution half has neither pictures nor planning.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter

from torch import Tensor

from diffusionpipe.errors import NonFiniteLossError, TrainingError
from diffusionpipe.ir.files import SURVEY, write_file, write_timeline
from diffusionpipe.runtime.comm.places import encoded_rows
from diffusionpipe.runtime.job.agreement import from_first, on_all
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.job.progress import RECORDING, STEP
from diffusionpipe.runtime.job.stall import stacks_file
from diffusionpipe.runtime.machine.cores import data_workers_for
from diffusionpipe.runtime.machine.occupied_memory import forget_peak
from diffusionpipe.trainer.checkpoints.checkpoint import read_state
from diffusionpipe.trainer.checkpoints.checkpoint_folder import kept_of, latest
from diffusionpipe.trainer.checkpoints.run_checkpoints import RunCheckpoints
from diffusionpipe.trainer.checkpoints.training_state import load_training
from diffusionpipe.trainer.course.caching import cache_of, names_of_kept, with_cache
from diffusionpipe.trainer.course.copy_memory import can_checkpoint_async
from diffusionpipe.trainer.course.documents import SURVEY_FILE, write_documents
from diffusionpipe.trainer.course.evaluation import averaged, validate
from diffusionpipe.trainer.course.first_steps import FirstSteps
from diffusionpipe.trainer.course.kept_facts import KeptFacts, facts_to_keep, kept_facts
from diffusionpipe.trainer.course.kept_samples import keep_in_session, sample_folder
from diffusionpipe.trainer.course.preparation import Data, Resumed, locked_folder, prepare_folder, read_data
from diffusionpipe.trainer.course.recipe_changes import Settled, settle
from diffusionpipe.trainer.course.resuming import checkpoint_of
from diffusionpipe.trainer.course.run_end import EXPORT, forget_end, has_ended, note_end
from diffusionpipe.trainer.course.run_identity import GROWTH, OF_DATA, check_resumed, run_identity
from diffusionpipe.trainer.course.run_samples import check_sampling, request_of, sampling_settings
from diffusionpipe.trainer.course.run_state import Hooks, RunState, names_of, planning_of
from diffusionpipe.trainer.course.step_reports import StepReports
from diffusionpipe.trainer.course.traced import TracedSteps
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.data.decoding.levels import keeps_levels
from diffusionpipe.trainer.data.scan.data_files import write_ledger
from diffusionpipe.trainer.exports.export import export
from diffusionpipe.trainer.exports.run_export import adapters_of_checkpoints, export_settings
from diffusionpipe.trainer.inference.cascade_drawing import captions_of, draw_in_session, shown
from diffusionpipe.trainer.inference.clip_rate import drawn_rate, write_rate
from diffusionpipe.trainer.launching.exit_status import ExitStatus
from diffusionpipe.trainer.launching.launch import LOGS
from diffusionpipe.trainer.model.decisions import decided_for_run
from diffusionpipe.trainer.model.members import Member, RecipeModels, open_model
from diffusionpipe.trainer.optim.named_rates import LossRates, kept_rates
from diffusionpipe.trainer.recipe import Recipe, values_of
from diffusionpipe.trainer.reporting.metrics import MetricsWriter
from diffusionpipe.trainer.reporting.progress import TrainingProgress
from diffusionpipe.trainer.reporting.rank_memory import RankMemory
from diffusionpipe.trainer.reporting.screen import Heard, NoScreen, Screen, steps_of
from diffusionpipe.trainer.reporting.trackers import Trackers, open_trackers
from diffusionpipe.trainer.setup.session import open_session
from diffusionpipe.trainer.setup.start import Start, loading_of, places
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.trainer.step.spikes import Spikes, kept_values
from diffusionpipe.trainer.step.step_result import StepResult
from diffusionpipe.trainer.step.stopping import DRAW, Stopping
from diffusionpipe.trainer.step.windows import WindowStepper

logger = logging.getLogger(__name__)

NUM_TRACED = 15
"""The number of last steps of a run that are timed; the one of median length becomes the run's timeline."""


def run(recipe: Recipe, job: Job, hooks: Hooks, *, resume: str | None = None, take_over: bool = False) -> int:
    """Trains as the recipe says and returns the number of steps done, fewer than asked after a request to stop.

    Every rank of the job calls it with the same arguments. Results are in the run's folder, which no other job may use
    meanwhile. `resume`: "latest", "auto", a step or a path; None for a new run. `take_over`: take the folder from a job
    on another machine that gives no sign of life.

    Raises:
        ConfigError: the recipe, the data, the model or the checkpoint cannot be used, or a file cannot be written.
        TrainingError: a loss or a weight is not finite, or the loss has a spike.
        PeerError: another rank died.
    """
    with locked_folder(recipe.run.folder, job, take_over=take_over):
        return _run(recipe, job, hooks, resume)


def _run(recipe: Recipe, job: Job, hooks: Hooks, resume: str | None) -> int:
    """Trains as `run` does, in a folder that is locked for this job; returns the number of steps done."""
    folder, is_first = recipe.run.folder, job.membership.rank == 0
    job.progress.configure(recipe.run.stuck_after, folder / LOGS)
    job.watchdog.remedy = lambda: "" if job.membership.is_heard else kept_of(folder).remedy()
    prepare_folder(folder, resume)
    stacks_file(folder / LOGS, job.membership.rank).unlink(missing_ok=True)  # stacks of an earlier start
    screen = Heard(hooks.screen if is_first else NoScreen(), job.progress)
    with screen.work("verifying the checkpoint"):
        checkpoint = checkpoint_of(folder, resume)
    # Before `_settled`: the checkpoint holds decided values, and "auto" would count as a change.
    recipe = decided_for_run(recipe, job, checkpoint)
    settled = _settled(recipe, job, hooks, checkpoint)
    recipe = settled.recipe
    resumed = _resumed(checkpoint, recipe) if checkpoint is not None else None
    with screen.work("reading model and data") as work:
        opened = open_model(recipe, job)
        # `training.steps` is known from here on, where epochs give it.
        opened, data = read_data(opened, work, lambda: check_sampling(opened), resumed=resumed)
        recipe = opened.recipe
        settled = replace(settled, recipe=recipe)
        if hooks.settled is not None:
            hooks.settled(recipe)
    identity = run_identity(opened, data.train.dataset)
    step = 0 if resumed is None else resumed.step
    if checkpoint is not None:
        _check(checkpoint, identity, recipe, data)
        # Nothing is measured or planned for a run whose steps are done.
        if step == recipe.training.num_steps:
            _end_again(opened, job, checkpoint, screen)
            return step
    if hooks.tell_data is not None and data.survey is not None:
        hooks.tell_data(data.survey.lines)
    # Trackers end their runs, however this one ends.
    with ExitStack() as recording:
        # A login may be missing: before anything long.
        trackers = Trackers() if checkpoint is not None else _opened_trackers(recipe, recording)
        found = cache_of(opened, data)
        planning = planning_of(hooks, screen, data, is_resumed=checkpoint is not None)
        session = open_session(recipe, job, planning, opened, kept=names_of_kept(found))
        data, cache = with_cache(found, session, data, hooks.judge_cache)
        if data.sizes is not None:  # micro-batches that follow each other are about as long: stages wait less
            data = replace(data, sizes=replace(data.sizes, pipelines=session.plan.mesh.data_parallel))
        # One rank looks for signal files; its votes reach all.
        stopping = Stopping(folder=folder if session.is_first else None, peer_failure=job.watchdog.failure)
        with stopping.listening():
            state = RunState(
                session=session,
                hooks=hooks,
                screen=screen,
                data=data,
                cache=cache,
                stopping=stopping,
                metrics=None,
                kept=facts_to_keep(identity, values_of(recipe), settled.stated),
                step=step,
                spikes=Spikes(recipe.training.on_spike),
                loss_rates=_loss_rates(recipe),
                checkpoints=RunCheckpoints(
                    job,
                    folder,
                    recipe.checkpoint.keep,
                    screen,
                    is_asynchronous=can_checkpoint_async(session),
                    published=adapters_of_checkpoints(recipe, session.members) if recipe.checkpoint.adapters else None,
                ),
            )
            if checkpoint is not None:
                _load(state, checkpoint)
            _announce(state, checkpoint)
            from_first(lambda: _record(state, trackers, recording, is_resumed=checkpoint is not None))
            _train_to_end(state)
    _finish(state)
    return state.step


def _train_to_end(state: RunState) -> None:
    """Runs all steps and saves the last checkpoint, which is completed also where training fails on all ranks alike."""
    try:
        _train(state)
        # The last step may have saved already, as `checkpoint.every` says.
        if state.checkpoints.saved != state.step:
            _save(state, is_last=True)
        state.checkpoints.finish()
        if state.cache is not None:
            state.cache.close()
            if state.session.is_first:
                counts = {name.removeprefix("num_"): count for name, count in state.cache.counts().items()}
                logger.info("cache_of_this_rank %s", " ".join(f"{name}={count}" for name, count in counts.items()))
    except BaseException as error:
        state.checkpoints.leave(error)
        if isinstance(error, TrainingError):  # after the last checkpoint is complete
            kept = kept_of(state.session.recipe.run.folder)
            raise type(error)(f"{error}\n{kept.remedy(may_be_ruined=True)}") from error
        raise


def _opened_trackers(recipe: Recipe, recording: ExitStack) -> Trackers:
    """The trackers of a new run on rank 0, and an object without trackers on the other ranks; every rank calls it.

    `recording` closes them.
    """
    opened = Trackers()

    def open_here() -> None:
        nonlocal opened
        opened = recording.enter_context(closing(open_trackers(recipe, None)))

    from_first(open_here)
    return opened


def _record(state: RunState, trackers: Trackers, recording: ExitStack, *, is_resumed: bool) -> None:
    """Writes the documents of the run, and opens its metrics, trackers and progress; rank 0 calls it.

    `recording` closes them. `trackers`: the open trackers of a new run.

    A resumed run opens its trackers only now, because they need the step.
    """
    session, step = state.session, state.step
    recipe = session.recipe
    forget_end(recipe.run.folder)
    assert state.data.ledger is not None, "it is that of rank 0"
    assert state.data.survey is not None, "it is that of rank 0"
    write_ledger(recipe.run.folder, state.data.ledger)
    write_file(state.data.survey, recipe.run.folder / SURVEY_FILE, SURVEY)
    write_documents(recipe, session.plan)
    write_rate(recipe.run.folder, drawn_rate(recipe, state.data.train.dataset))
    if is_resumed:
        trackers = recording.enter_context(closing(open_trackers(recipe, step)))
    state.metrics = recording.enter_context(MetricsWriter(recipe.run.folder, step if is_resumed else None, trackers))
    state.progress = TrainingProgress(
        num_steps=recipe.training.num_steps, first_step=step, batch=session.plan.batch, screen=state.screen
    )


def _settled(recipe: Recipe, job: Job, hooks: Hooks, checkpoint: Path | None) -> Settled:
    """The recipe with which the run continues; every rank calls it, and rank 0 logs its changes."""
    settled = Settled(recipe=recipe, stated=hooks.stated)
    if checkpoint is not None:
        settled = on_all(lambda: settle(recipe, hooks.stated, _kept(checkpoint)))
    if hooks.settled is not None:
        hooks.settled(settled.recipe)
    for note in settled.notes if job.membership.rank == 0 else ():
        logger.info("%s", note)
    return settled


def _kept(checkpoint: Path) -> KeptFacts:
    return kept_facts(read_state(checkpoint), checkpoint)


def _resumed(checkpoint: Path, recipe: Recipe) -> Resumed:
    """The step from which the run continues, and whether its data have grown; every rank calls it."""

    def read() -> Resumed:
        kept = _kept(checkpoint)
        step = check_resumed(kept, {}, recipe.training.steps)
        return Resumed(step=step, has_grown=bool(kept.identity.get(GROWTH)))

    return on_all(read)


def _check(checkpoint: Path, identity: Mapping[str, object], recipe: Recipe, data: Data) -> None:
    """Refuses a checkpoint of another run, by its identity and its step; every rank calls it.

    Raises:
        CheckpointError: on all ranks; the data or models differ, or the step lies after the recipe's end.
    """

    def check() -> None:
        # The ledger has compared the data file by file already, and they may have grown since.
        compared = {name: value for name, value in identity.items() if not (data.is_continued and name in OF_DATA)}
        check_resumed(_kept(checkpoint), compared, recipe.training.num_steps)

    from_first(check)


def _load(state: RunState, checkpoint: Path) -> None:
    """Puts the checkpoint's model, optimizer, average, spikes and learning rates into the run's state."""
    with state.screen.work("loading the checkpoint"):
        loaded = load_training(checkpoint, state.session.state, is_verified=True)
    recipe = state.session.recipe
    state.spikes = Spikes(recipe.training.on_spike, kept_values(loaded))
    state.loss_rates = _loss_rates(recipe, kept_rates(loaded))


def _loss_rates(recipe: Recipe, kept: Mapping[str, object] | None = None) -> LossRates:
    """The learning rate scheduler that reacts to losses.

    `kept`: its values in the checkpoint from which the run continues; None for a run that begins.
    """
    settings = recipe.learning_rate
    return LossRates(settings.schedule.value, settings.arguments, recipe.optimizer.learning_rate, kept)


def _announce(state: RunState, checkpoint: Path | None) -> None:
    """Hands all facts that are settled before the first step to the command line, on every rank."""
    session = state.session
    hosts, devices = places(session.job)
    if state.hooks.announce is not None:
        samples, held_out = state.data.train.dataset.samples, state.data.validation
        start = Start(
            recipe=session.recipe,
            model=session.model,
            plan=session.plan,
            hosts=hosts,
            devices=devices,
            samples=len(samples),
            conditions=sum(sample.condition is not None for sample in samples),
            held_out=len(held_out.dataset.samples) if held_out is not None else None,
            step=state.step,
            checkpoint=checkpoint,
            loading=loading_of(session.job, _loader(state), hosts),
        )
        state.hooks.announce(start)


def _train(state: RunState) -> None:
    session, recipe, progress = state.session, state.session.recipe, state.session.job.progress
    worker = session.worker
    progress.executors = [*worker.executors.values(), *([worker.window] if worker.window else [])]
    loader = _loader(state)
    traced = TracedSteps(session)
    forget_peak(session.job.device)
    used = RankMemory(recipe.run.folder, session.job.membership.rank, is_new=state.step == 0)
    with (
        closing(progress.taken(iter(loader))) as batches,
        closing(FirstSteps(state)) as first_steps,
        state.progress or nullcontext(),
        StepReports(state, lambda: stepper.take_times(), used) as reports,  # `stepper` is made below
        progress.phase(STEP),
        ExitStack() as beginning,
    ):
        if recipe.sampling.at_start and state.step == 0:
            _evaluate(state, is_wanted=True)
        beginning.enter_context(state.screen.work("first step"))
        stepper = _stepper(state, batches)
        if (first := worker.prologue) is not None:
            worker.feed(first, _noted(state, next(batches)))
            first.run()
            _keep(state)
        while state.step < recipe.training.num_steps:
            started, progress.step = perf_counter(), state.step + 1
            # A window takes the batches that begin in it.
            inputs = _noted(state, next(batches)) if worker.window is None else {}
            waited = perf_counter() - started
            is_traced = worker.window is None and state.step >= recipe.training.num_steps - NUM_TRACED
            if is_traced:
                traced.begin()
            reports.waited(state.step + 1, waited)
            first_steps.begin()
            results = stepper.step(state.step, inputs)
            first_steps.end(stepper)
            _keep(state)
            beginning.close()  # the work of the first step is no longer shown
            progress.end_step(perf_counter() - started)
            state.step += 1
            if is_traced:
                traced.end(stepper)
            # A post-validated step may still be taken back: it is settled before its weights are read.
            if _needs_final_weights(state, results):
                results += stepper.settle()
                stepper.finish_times()
            with progress.phase(RECORDING):
                reports.write(results)
            for result in results:
                state.checkpoints.after(result.step, result.saving_votes)
            _evaluate(state)
            if any(result.decision.draws for result in results):
                _draw_once(state)
            stops = any(result.decision.stops for result in results)
            if any(result.decision.saves for result in results) or _is_due(recipe.checkpoint.every, state.step):
                # The last save waits until the files are complete; others are written while training continues.
                _save(state, is_last=stops or state.step == recipe.training.num_steps)
            # Validation, drawings and saves do not count as time of steps.
            if state.progress is not None:
                state.progress.pause()
            if stops and state.step < recipe.training.num_steps:  # else nothing is left to stop
                status = ExitStatus.STOPPED
                logger.warning("stopped step=%d reason=requested exit_status=%d resume=latest", state.step, status)
                break
    if state.step == recipe.training.num_steps:
        state.timeline = traced.timeline()


def _noted(state: RunState, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, which the run encodes next; the cache notes the keys of its rows."""
    if state.cache is not None:
        state.cache.feed(batch)
    return batch


def _keep(state: RunState) -> None:
    """Puts the frozen outputs of the batch that has just been encoded into the cache, if there is one.

    No step reads them before the next one begins.
    """
    worker = state.session.worker
    if state.cache is not None:
        state.cache.take(worker.train.first_store, encoded_rows(worker.train.schedule, worker.place.worker))


def _loader(state: RunState) -> StepLoader:
    """The batches of this rank's training samples, from the run's step on."""
    session, recipe = state.session, state.session.recipe
    workers = recipe.data.workers
    return StepLoader(
        source=state.data.train,
        batch=session.plan.batch,
        positions=session.positions,
        sizes=state.data.sizes,
        group=session.group_positions,
        first_step=state.step,
        # Where each step encodes the batch of the next one, the last step encodes a batch too many.
        num_steps=recipe.training.num_steps - state.step + session.worker.encodes_ahead,
        workers=data_workers_for(session.job.device.type, os.environ) if workers is None else workers,
        pin_memory=session.job.device.type == "cuda",
        has_levels=keeps_levels(session.job.device),
        on_start=session.job.progress.help_from,
    )


def _stepper(state: RunState, batches: Iterator[dict[str, Tensor]]) -> Stepper | WindowStepper:
    """The object that runs the steps, with a flush at the end of each or without."""
    session = state.session
    if session.worker.window is None:
        return Stepper(session, state.stopping, names_of(state), state.spikes, state.checkpoints, state.loss_rates)
    return WindowStepper(session, state.stopping, names_of(state), batches, partial(is_flush, session.recipe))


def is_flush(recipe: Recipe, step: int) -> bool:
    """Whether a training without flushes empties its pipeline after `step` steps: the weights are read, or it ends."""
    every = (recipe.pipeline.flush_every, *_reading_weights(recipe))
    return step >= recipe.pipeline.num_unflushed(recipe.training.num_steps) or any(_is_due(one, step) for one in every)


def _reading_weights(recipe: Recipe) -> tuple[int | None, ...]:
    """The intervals, in steps, after which the weights are read outside of training; None for a reader that is off."""
    return recipe.checkpoint.every, recipe.validation.every, recipe.sampling.every, recipe.training.num_steps


def _needs_final_weights(state: RunState, results: Sequence[StepResult]) -> bool:
    """Whether the weights are read outside of training after this step."""
    wanted = _reading_weights(state.session.recipe)
    decided = any(result.decision.needs_weights for result in results)
    return decided or any(_is_due(every, state.step) for every in wanted)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _evaluate(state: RunState, *, is_wanted: bool = False) -> None:
    """Validates and draws samples if they are due after this step, and after the last step.

    `is_wanted`: do both if the recipe has them, due or not.
    """
    session, recipe = state.session, state.session.recipe
    is_wanted = is_wanted or state.step == recipe.training.num_steps
    if state.data.validation is not None and (_is_due(recipe.validation.every, state.step) or is_wanted):
        with state.screen.work("validating"):
            result = validate(session, state.data.validation, state.data.held)
        if not isfinite(result.loss):
            raise NonFiniteLossError(
                f"step {state.step}: the validation loss is {result.loss}, so these weights are not saved.\n"
                "Lower optimizer.learning_rate or set training.clip_norm."
            )
        # A finite validation proves the weights, which `_save` notes in the checkpoint.
        state.validated = state.step
        if state.metrics is not None:
            logger.info("step=%d validation_loss=%.5f", state.step, result.loss)
            by_time = {f"validation_loss_t{time:g}": loss for time, loss in result.by_time}
            by_backbone = {f"validation_loss/{name}": loss for name, loss in result.by_backbone if name}
            state.metrics.write(state.step, {"validation_loss": result.loss, **by_backbone, **by_time})
    if recipe.sampling.every is not None and (_is_due(recipe.sampling.every, state.step) or is_wanted):
        _draw(state)


def _draw_once(state: RunState) -> None:
    """Draws samples because a person has asked for it, unless it has drawn with these weights; every rank calls it."""
    if state.session.recipe.sampling.every is None:
        if state.session.is_first:
            logger.warning("the recipe draws nothing, so the file %s has no effect; set sampling.every", DRAW)
    elif state.drawn != state.step:
        _draw(state)


def _draw(state: RunState) -> None:
    """Draws the recipe's samples with the present weights, and writes them on rank 0; every rank calls it."""
    session, recipe = state.session, state.session.recipe
    rate = drawn_rate(recipe, state.data.train.dataset)
    wish, settings = request_of(recipe, rate), [sampling_settings(member) for member in session.members]
    started, state.drawn = perf_counter(), state.step
    with state.screen.work("drawing samples") as work, averaged(session):
        drawn = draw_in_session(session, wish, settings, on_step=steps_of(work))
    if drawn is not None:
        assert state.metrics is not None, "the first worker shows the pictures, which is rank 0"
        with session.job.progress.phase(RECORDING):
            kept = keep_in_session(session, state.step, drawn[-1], wish, settings[-1])
            state.metrics.show(state.step, kept)
            grid = sample_folder(recipe.run.folder, state.step).with_suffix(".png")
            captions = captions_of([member.name for member in session.members], wish.captions)
            state.hooks.save_grid(shown(drawn), captions, grid)
        logger.info("step=%d drawn=%s draw_s=%.1f", state.step, grid, perf_counter() - started)


def _save(state: RunState, *, is_last: bool) -> None:
    values = {"step": state.step, **state.kept, **state.spikes.state(), **state.loss_rates.state()}
    is_proven = state.validated == state.step
    if state.cache is not None:
        state.cache.flush()
    state.checkpoints.save(state.step, state.session.state, values, is_proven=is_proven, is_last=is_last)


def _finish(state: RunState) -> None:
    """Writes the timeline and the export of a finished run on rank 0; the other ranks wait at the job's end."""
    session, recipe = state.session, state.session.recipe
    if not session.is_first or state.step < recipe.training.num_steps:
        return
    folder = recipe.run.folder
    if state.timeline is not None:
        write_timeline(state.timeline, folder / "timeline.json")
    checkpoint = latest(folder)
    assert checkpoint is not None, "just saved"
    _export(recipe, session.members, checkpoint, state.screen)


def _export(recipe: Recipe, members: Sequence[Member], checkpoint: Path, screen: Screen) -> None:
    """Exports the weights of the last checkpoint, and notes that the run has ended; rank 0 calls it."""
    started, destination = perf_counter(), recipe.run.folder / EXPORT
    with screen.work("exporting"):
        for member in members:
            export(checkpoint, destination / member.name, export_settings(member))
    note_end(recipe, checkpoint)
    logger.info("step=%d export=%s export_s=%.1f", recipe.training.num_steps, destination, perf_counter() - started)


def _end_again(opened: RecipeModels, job: Job, checkpoint: Path, screen: Screen) -> None:
    """Writes the export again for a run whose steps are all done, if files of it are missing; every rank calls it."""
    recipe = opened.recipe
    is_complete = from_first(lambda: has_ended(recipe, checkpoint))
    if job.membership.rank:  # rank 0 alone writes
        return
    folder, steps = recipe.run.folder, f"all {recipe.training.num_steps:,} steps are done"
    if is_complete:
        logger.info("nothing to do: %s, and %s is complete; raise training.steps to train on", steps, folder / EXPORT)
        return
    logger.info("%s; %s lacks files that this recipe asks for: it is written again", steps, folder / EXPORT)
    _export(recipe, opened.members, checkpoint, screen)

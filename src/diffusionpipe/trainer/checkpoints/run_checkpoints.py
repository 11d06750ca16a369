"""The checkpoints of a run under way: written while training waits, or beside it.

    main thread    step 5 | plan | step 6 | step 7 ...... | tell all | step 8 | step 9 | done
    other thread                 | copy, check, write, sync, read    | publish, prune (first rank)

Only the main threads talk to other ranks, at the ends of steps. A sum over all ranks at the end of each step carries a
vote of every rank whose thread has ended (`vote`), so all ranks take the next action (`after`) at the same step. A
checkpoint gets its name when the files of all ranks are on the disk and read again, as without a thread.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from diffusionpipe.errors import CheckpointError, NonFiniteWeightsError, TrainingError
from diffusionpipe.runtime.job.agreement import agree, together
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.checkpoints.background_task import BackgroundTask
from diffusionpipe.trainer.checkpoints.checkpoint import Saving, State, prune, save
from diffusionpipe.trainer.checkpoints.host_copy import HostCopy
from diffusionpipe.trainer.checkpoints.manifest import FileRecord
from diffusionpipe.trainer.checkpoints.training_state import (
    TrainingState,
    check_finite,
    first_weight_not_finite,
    refuse_not_finite,
    training_tensors,
)
from diffusionpipe.trainer.reporting.screen import Screen
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PHASE = "saving"
_PATIENCE: Seconds = 3.0
"""The seconds to wait for the end of a thread whose work was abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """The results of the thread that checks and writes a rank's tensors."""

    not_finite: str | None
    """The name of a tensor with a NaN or an infinity, which forbids the checkpoint; None if all are finite."""
    part: tuple[FileRecord, ...] | None
    """The record of the rank's file, () if it has none to write; None if a tensor is not finite."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint on its way to the disk: its writing, its thread and its times. It is mutable."""

    saving: Saving
    step: int
    started: Seconds
    """The time at which the checkpoint began, by `perf_counter`."""
    standstill: Seconds
    """The seconds for which training has waited for it until now."""
    writing: BackgroundTask[_Checked] | None
    """The writing thread; None once all ranks have its result."""
    publishing: BackgroundTask[None] | None = None
    """The thread that publishes the checkpoint on the first rank, after it was written."""

    @property
    def task(self) -> BackgroundTask[_Checked] | BackgroundTask[None] | None:
        """The task of the thread at work for the checkpoint; None on a rank that does not publish."""
        return self.writing or self.publishing


class RunCheckpoints:
    """Saves the checkpoints of one run on one rank, at once or in the background.

    At most one is on its way to the disk.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        keep: int,
        screen: Screen,
        *,
        is_asynchronous: bool,
        published: Callable[[Path], None] | None = None,
    ) -> None:
        """Takes the settings of the run's checkpoints; nothing is written yet.

        `keep`: the number of finished checkpoints that are not deleted. `published`: a function that the first rank
        calls, in any thread, with the folder of each finished checkpoint. `is_asynchronous`: write while training
        continues.
        """
        self._published = published
        self._job, self._folder, self._keep, self._screen = job, folder, keep, screen
        self._size = job.membership.world_size
        self._is_first = job.membership.rank == 0
        self._host = HostCopy(job.device) if is_asynchronous else None
        self._pending: _Pending | None = None
        self._is_proven = True
        self.saved: int | None = None
        """The step of the last checkpoint of this process, which may still be on its way."""

    @property
    def is_idle(self) -> bool:
        """Whether no checkpoint is on its way to the disk."""
        return self._pending is None

    # At the end of a step; every rank calls these with the same values.

    def save(self, step: int, state: TrainingState, others: State, *, is_proven: bool, is_last: bool) -> None:
        """Saves the training state after `step` as a checkpoint: at once, or begins it in the background.

        It first waits for the checkpoint before. `others`: the values of its state.json. `is_proven`: these weights
        have given a finite validation loss; until then one more checkpoint is kept. `is_last`: training ends here, so
        the checkpoint is written at once.

        Raises:
            CheckpointError: on all ranks; this checkpoint, or the one before, could not be written.
            NonFiniteWeightsError: on all ranks; a weight is NaN or infinite.
        """
        # The next copy overwrites the host memory from which the last one is written.
        self._wait_for_previous(step)
        with self._screen.work(_PHASE):
            tensors = training_tensors(state)
            self.saved, self._is_proven = step, is_proven
            if self._host is None or is_last:
                check_finite(tensors, step)
                save(self._folder, step, tensors, others, keep=self._kept, published=self._published)
            else:
                self._begin(step, tensors, others, self._host)

    def after(self, step: int, votes: int) -> None:
        """Takes the next action for the checkpoint on its way, if the threads of all ranks have ended.

        Every rank calls it after step `step` had a finite loss. `votes`: the sum of `vote` over all ranks.

        Raises:
            CheckpointError: on all ranks; the checkpoint on its way could not be written.
            NonFiniteWeightsError: on all ranks; it holds such weights.
        """
        # A step after the checkpoint has run with its weights and had a finite loss.
        if not self._is_proven and self.saved is not None and step > self.saved:
            self._is_proven = True
            if self._pending is None and self._is_first:  # else `_advance` prunes, when the newest is complete
                prune(self._folder, self._keep)
        if self._pending is not None and votes >= self._size:
            with self._job.progress.phase(_PHASE):
                self._advance(self._pending)

    def finish(self) -> None:
        """Waits until no checkpoint is on its way.

        Raises:
            CheckpointError: on all ranks; the checkpoint on its way could not be written.
            NonFiniteWeightsError: on all ranks; it holds such weights.
        """
        while self._pending is not None:
            with self._screen.work(f"waiting for the checkpoint of step {self._pending.step}"):
                self._advance(self._pending)

    # Within a step.

    def vote(self) -> int:
        """A number to be summed over all ranks: the rank's vote that its thread has ended.

        0 while the thread works or nothing is on its way, 1 after its end, the number of ranks if it has failed.
        """
        if self._pending is None:
            return 0
        task = self._pending.task
        if task is None:
            return 1
        if not task.is_done:
            return 0
        # One failure is enough: the sum reaches the number of ranks, and all learn of it.
        return self._size if task.has_failed else 1

    def protect(self) -> None:
        """Waits until the weights may change: they are copied, or later work of the GPU waits for the copy."""
        if self._host is not None and self._pending is not None:
            started = perf_counter()
            self._host.protect()
            self._pending.standstill += perf_counter() - started

    # When an error ends the run.

    def leave(self, error: BaseException) -> None:
        """Ends the checkpoint on its way: completes it where all ranks raise `error`, else stops the thread.

        A failure of the completion is only logged.
        """
        if self._pending is None:
            return
        # All ranks raise these alike, so they can still agree. After other errors a peer may be gone for ever.
        if isinstance(error, TrainingError) or (self._size == 1 and isinstance(error, Exception)):
            try:
                self.finish()
            except (CheckpointError, NonFiniteWeightsError) as failure:
                logger.warning("%s", failure)
        elif self._pending.task is not None:
            self._pending.task.abandon(_PATIENCE)

    # Inside.

    @property
    def _kept(self) -> int:
        """The number of checkpoints to keep: one more until the newest one's weights have given a finite loss."""
        return self._keep if self._is_proven else self._keep + 1

    def _wait_for_previous(self, step: int) -> None:
        if self._pending is None:
            return
        previous, started = self._pending.step, perf_counter()
        self.finish()
        if self._is_first:
            logger.info(
                'step=%d waited_s=%.2f reason="the checkpoint of step %d was still being written"',
                step,
                perf_counter() - started,
                previous,
            )

    def _begin(self, step: int, tensors: Mapping[str, Tensor], others: State, host: HostCopy) -> None:
        """Starts to copy the tensors that this rank writes, and a thread that checks and writes the copies."""
        started = perf_counter()
        saving = Saving(self._folder, step, others, published=self._published)
        try:
            names = saving.plan(tensors)
        except CheckpointError as error:
            raise saving.give_up(error) from error
        # The copy starts now, before the weights change. Its error waits for `_tell_all`, where all ranks hear of it.
        start = _attempt(lambda: host.start({name: tensors[name] for name in names}))

        def write(go_on: Callable[[], None]) -> _Checked:
            copies = start()
            host.complete()
            not_finite = first_weight_not_finite(copies)  # of the copies: the weights themselves change meanwhile
            return _Checked(not_finite=not_finite, part=None if not_finite else saving.write(copies, go_on))

        self._pending = _Pending(
            saving=saving,
            step=step,
            started=started,
            writing=BackgroundTask(write, f"writing the checkpoint of step {step}", self._job.progress),
            standstill=perf_counter() - started,
        )

    def _advance(self, pending: _Pending) -> None:
        """Waits for the threads of all ranks, and begins to publish the checkpoint, or reports that it is complete.

        Raises:
            CheckpointError: on all ranks; the checkpoint could not be written.
            NonFiniteWeightsError: on all ranks; a weight is NaN or infinite.
        """
        started = perf_counter()
        self._pending = None  # if it fails
        try:
            if pending.writing is not None:
                self._tell_all(pending, pending.writing)
                self._pending = pending
            else:
                together(pending.publishing.result if pending.publishing is not None else lambda: None)
        except CheckpointError as error:
            raise pending.saving.give_up(error) from error
        pending.standstill += perf_counter() - started
        if self._pending is None:
            pending.saving.report(pending.standstill, perf_counter() - pending.started)
            if self._is_first and self._is_proven:
                prune(self._folder, self._keep)

    def _tell_all(self, pending: _Pending, writing: BackgroundTask[_Checked]) -> None:
        """Tells all ranks the results of every rank's thread, and starts the thread that publishes on the first rank.

        Raises:
            NonFiniteWeightsError: on all ranks; a weight is NaN or infinite.
        """
        found = agree(lambda: writing.result().not_finite)
        if any(name is not None for name in found):
            # Removes the hidden folder; the error that all raise comes next.
            pending.saving.give_up(CheckpointError("weights are not finite"))
        refuse_not_finite(found, pending.step)
        part = writing.result().part
        assert part is not None, "only weights that are not finite prevent it"
        pending.saving.collect(part)
        pending.writing = None
        if self._is_first:
            keep = self._kept  # read now: the main thread may change it while the other one publishes

            def publish(go_on: Callable[[], None]) -> None:
                pending.saving.publish()
                prune(self._folder, keep)

            pending.publishing = BackgroundTask(
                publish, f"publishing the checkpoint of step {pending.step}", self._job.progress
            )


def _attempt(action: Callable[[], T]) -> Callable[[], T]:
    """Runs the action at once, and returns a function that returns its result or raises its error.

    The function may be called later and in another thread.
    """
    done: Future[T] = Future()
    try:
        done.set_result(action())
    except Exception as error:
        done.set_exception(error)
    return done.result

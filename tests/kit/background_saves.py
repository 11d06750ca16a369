"""Trainings whose checkpoints take their time or fail while training goes on, for ranks of a crew."""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kit.tiny_runs import train
from torch import Tensor

from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.checkpoints.checkpoint import Saving
from diffusionpipe.trainer.checkpoints.host_copy import HostCopy
from diffusionpipe.trainer.checkpoints.manifest import FileRecord
from diffusionpipe.trainer.recipe import Recipe

PATIENCE = 60.0
WRITING = "writing the checkpoint"
"""How the threads are called."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """What this process logs."""
    handler, logger = _Heard(), logging.getLogger("diffusionpipe")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def step_of(saving: Saving) -> int:
    return int(saving.path.name.removeprefix("step-"))


def train_with_late_writes(
    job: Job, recipe: Recipe, until: Mapping[int, int], resume: str | None = None
) -> tuple[int, list[str]]:
    """The run, and the log. Copies are late; a checkpoint is written only when the step `until[its step]` begins."""
    begun = {later: threading.Event() for later in until.values()}
    write, complete = Saving.write, HostCopy.complete

    def complete_late(host: HostCopy) -> None:
        time.sleep(0.2)
        complete(host)

    def late(saving: Saving, *given: Any) -> tuple[FileRecord, ...]:
        later = until.get(step_of(saving))
        assert later is None or begun[later].wait(PATIENCE)
        return write(saving, *given)

    def begin(later: int) -> None:
        begun[later].set()

    at = {later: lambda *_, later=later: begin(later) for later in begun}
    late_copy = mock.patch.object(HostCopy, "complete", complete_late)
    with mock.patch.object(Saving, "write", late), late_copy, heard() as messages:
        return train(job, recipe, resume, at=at), messages


def train_with_a_full_disk(job: Job, recipe: Recipe, *, step: int, rank: int) -> int:
    """The run; a rank cannot write the checkpoint of a step, and two steps later its thread has ended."""
    write = Saving.write

    def failing(saving: Saving, copies: Mapping[str, Tensor] | None = None, *given: Any) -> tuple[FileRecord, ...]:
        assert copies is not None, "this one is written while training goes on"
        if step_of(saving) == step and job.membership.rank == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(saving, copies, *given)

    def join(*_: Any) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith(WRITING):
                thread.join(PATIENCE)

    with mock.patch.object(Saving, "write", failing):
        return train(job, recipe, at={step + 2: join})


def train_and_hear(job: Job, recipe: Recipe) -> tuple[str, list[str]]:
    """The error that ends the run, with its class, and the log."""
    with heard() as messages:
        try:
            train(job, recipe)
        except Exception as error:
            return f"{type(error).__name__}: {error}", messages
    return "", messages

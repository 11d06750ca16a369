"""Batches of raw inputs, decoded ahead by worker processes; each rank loads only the rows that it encodes.

A batch follows from (dataset, seed, step, positions) alone, so neither the number of ranks nor that of workers, nor
where a run was resumed, changes anything.
"""

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import data

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.batch import Augmentation, BatchSource, Rows, make_batch, sample_indices
from diffusionpipe.trainer.dataset import Sample

T = TypeVar("T")

PREFETCHED = 2
"""Batches that each worker keeps ready."""


@dataclass(frozen=True, kw_only=True)
class StepLoader:
    """The training batches of one rank, step after step.

    Iterating starts the workers and yields for each step the raw inputs by name, rows in the order of `positions`.
    Workers are spawned, not forked: the parent has threads of gloo or CUDA.

    Raises, while iterating:
        DataError: a picture cannot be decoded, or a worker was killed.
    """

    source: BatchSource
    batch: int
    """Samples of one step over all ranks."""
    positions: tuple[int, ...]
    """The positions in the global batch that this rank encodes."""
    first_step: int
    num_steps: int
    workers: int = 1
    """Worker processes; 0 decodes in this one."""
    pin_memory: bool = False

    def __post_init__(self) -> None:
        outside = [position for position in self.positions if not 0 <= position < self.batch]
        if outside:
            raise ValueError(f"positions {outside} lie outside a batch of {self.batch} samples")

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Generator[dict[str, Tensor], None, None]:
        return _raising(
            data.DataLoader(
                _Steps(self),
                sampler=range(self.first_step, self.first_step + self.num_steps),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self.workers,
                prefetch_factor=PREFETCHED if self.workers else None,
                multiprocessing_context="spawn" if self.workers else None,
                worker_init_fn=_start_worker,
                pin_memory=self.pin_memory,
                generator=torch.Generator(),  # otherwise it draws from the global one
            )
        )

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The samples of a step in the order of `positions`, e.g. to name them in an error."""
        return tuple(self.source.dataset.samples[index] for index in self._indices(step))

    def load(self, step: int) -> dict[str, Tensor]:
        """One step's batch, made in this process."""
        rows = Rows(samples=self._indices(step), positions=self.positions, step=step)
        return make_batch(self.source, rows)

    def _indices(self, step: int) -> tuple[int, ...]:
        return sample_indices(
            len(self.source.dataset.samples),
            seed=self.source.seed,
            batch=self.batch,
            step=step,
            positions=self.positions,
        )


def num_fixed_rows(source: BatchSource, *, times: tuple[float, ...], num_samples: int) -> int:
    """Rows of a whole validation: the first `num_samples` samples (or all there are) at each of the times."""
    return min(num_samples, len(source.dataset.samples)) * len(times)


def fixed_batches(
    source: BatchSource, *, batch: int, positions: tuple[int, ...], times: tuple[float, ...], num_samples: int
) -> Iterator[dict[str, Tensor]]:
    """Validation batches of one rank: the same samples, times and noise whenever it is called.

    Row r of the validation is sample r // len(times) at times[r % len(times)]; batch b holds the rows b * batch up to
    (b + 1) * batch. The last batch is filled up with the first rows again, which the caller leaves out of its mean
    (see `num_fixed_rows`). Pictures are cropped at the centre; nothing is flipped or dropped.
    """
    plain = replace(source, augmentation=Augmentation())
    num_rows = num_fixed_rows(source, times=times, num_samples=num_samples)
    for start in range(0, num_rows, batch):
        numbers = tuple((start + position) % num_rows for position in positions)
        rows = Rows(
            samples=tuple(number // len(times) for number in numbers),
            positions=numbers,
            step=0,
            purpose="validation.",
            times=tuple(times[number % len(times)] for number in numbers),
        )
        yield make_batch(plain, rows)


@dataclass(frozen=True)
class _Failure:
    """An error on its way from a worker; torch would wrap an exception into its traceback's text."""

    message: str


class _Steps(data.Dataset[dict[str, Tensor] | _Failure]):
    """The batches by step, as torch's DataLoader wants them."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __getitem__(self, step: int) -> dict[str, Tensor] | _Failure:
        try:
            return self.loader.load(step)
        except DataError as error:
            return _Failure(f"step {step}: {error}")


def _raising(loader: "data.DataLoader[dict[str, Tensor] | _Failure]") -> Generator[dict[str, Tensor], None, None]:
    """The batches; failures become errors again. Closing it ends the workers, which SIGTERM does not end."""
    with _signals_held():
        batches = iter(loader)
    try:
        for item in batches:
            if isinstance(item, _Failure):
                raise DataError(item.message)
            yield item
    except RuntimeError as error:
        if "DataLoader worker" in str(error) and "Caught" not in str(error):
            raise DataError(f"a process that decodes pictures died (out of memory?): {error}") from error
        raise
    finally:
        del batches  # torch ends the workers when their iterator goes


_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes that start in the block hold these signals back from their first instant, until they ignore them.

    Otherwise one that reaches the whole process group ends a worker that is still importing torch. This process's other
    threads take them meanwhile; its main thread hears of them after the block.
    """
    resource_tracker.ensure_running()  # it unblocks them once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


POLITENESS = 10
"""Added to the workers' nice value."""


def _start_worker(worker: int) -> None:
    """Leaves signals to the parent: it may want a last checkpoint, and its workers end when it does.

    Batches are decoded ahead, so a worker can wait until a rank that shares its core does.
    """
    os.nice(POLITENESS)
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)


def _as_it_is(item: T) -> T:
    return item

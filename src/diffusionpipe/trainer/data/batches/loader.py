"""Batches of raw inputs, decoded ahead by worker processes; each rank loads only the rows that it encodes.

A batch follows from (dataset, seed, step, positions) alone, so neither the number of ranks nor of workers, nor where a
run was resumed, changes anything.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from diffusionpipe.errors import DataError
from diffusionpipe.runtime.compute.runs import joined_runs
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, Turn, make_batch
from diffusionpipe.trainer.data.batches.sized import FixedRows, HeldSizes, SizedSamples, sized_batch, turns_at
from diffusionpipe.trainer.data.batches.workers import DataWorkers
from diffusionpipe.trainer.data.scan.dataset import Sample


@dataclass(frozen=True, kw_only=True)
class StepLoader:
    """The training batches of one rank, step after step.

    Iterating starts the workers and yields for each step the raw inputs by name, rows in the order of `positions`.

    Raises, while iterating:
        DataError: a picture cannot be decoded, or a worker failed or was killed.
    """

    source: BatchSource
    """The samples, and the settings by which they become raw inputs."""
    batch: int
    """The number of samples of one step over all ranks."""
    positions: tuple[int, ...]
    """The positions in the global batch that this rank encodes."""
    first_step: int
    """The number of the first step, from 0."""
    num_steps: int
    """The number of steps, each with one batch."""
    workers: int = 1
    """The number of worker processes; with 0 this process decodes."""
    pin_memory: bool = False
    """Whether batches are in page-locked memory."""
    has_levels: bool = False
    """Whether pictures stay uint8 levels; the device then looks up their values."""
    sizes: SizedSamples | None = None
    """The order of samples of several sizes; None where all have one size."""
    group: tuple[int, ...] = ()
    """The positions of all rows of this rank's pipeline; needed with `sizes`."""
    on_start: Callable[[DataWorkers], None] | None = None
    """A function that is called with the workers after their start; None for no call."""

    def __post_init__(self) -> None:
        outside = [position for position in self.positions if not 0 <= position < self.batch]
        if outside:
            raise ValueError(f"positions {outside} lie outside a batch of {self.batch} samples")

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Generator[dict[str, Tensor], None, None]:
        steps = range(self.first_step, self.first_step + self.num_steps)
        if self.workers == 0:
            return self._here(steps)
        return self._pinned(steps) if self.pin_memory else self._ahead(steps)

    def _here(self, steps: range) -> Generator[dict[str, Tensor], None, None]:
        for step in steps:
            try:
                batch = self.load(step)
            except DataError as error:
                raise DataError(f"step {step}: {error}") from error
            yield {name: value.pin_memory() for name, value in batch.items()} if self.pin_memory else batch

    def _ahead(self, steps: range) -> Generator[dict[str, Tensor], None, None]:
        with closing(self._started(steps)) as workers:
            for step in steps:
                yield workers.take(step)

    def _started(self, steps: range) -> DataWorkers:
        # The workers' processes need no callback.
        workers = DataWorkers(replace(self, on_start=None).load, steps, self.workers)
        if self.on_start is not None:
            self.on_start(workers)
        return workers

    def _pinned(self, steps: range) -> Generator[dict[str, Tensor], None, None]:
        """Yields the batch of each step in page-locked memory; a thread copies the next batch while one is used."""
        with ThreadPoolExecutor(1) as pool, closing(self._started(steps)) as workers:

            def take(step: int) -> dict[str, Tensor]:
                return {name: value.pin_memory() for name, value in workers.take(step).items()}

            # One batch is in the making while one is used.
            batches = deque(pool.submit(take, step) for step in steps[:1])
            for following in steps[1:]:
                batches.append(pool.submit(take, following))
                yield batches.popleft().result()
            yield from (batch.result() for batch in batches)

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The samples of a step's rows on this rank, in the order of `positions`, e.g. to name them in an error."""
        return tuple(self.source.dataset.samples[turn.sample] for turn in self._turns(step))

    def load(self, step: int) -> dict[str, Tensor]:
        """One step's raw inputs by name, made in this process, with a row for each of `positions`.

        Raises:
            DataError: a picture cannot be decoded and is not replaced.
        """
        if self.sizes is not None:
            return sized_batch(
                self.sizes,
                batch=self.batch,
                step=step,
                positions=self.positions,
                group=self.group,
                has_levels=self.has_levels,
            )
        turns = self._turns(step)
        rows = Rows(
            samples=tuple(turn.sample for turn in turns),
            passes=tuple(turn.number for turn in turns),
            positions=self.positions,
            step=step,
        )
        return make_batch(self.source, rows, has_levels=self.has_levels)

    def _turns(self, step: int) -> tuple[Turn, ...]:
        return turns_at(self.source, self.sizes, batch=self.batch, step=step, positions=self.positions)


def num_fixed_rows(source: BatchSource, *, times: tuple[float, ...], num_samples: int) -> int:
    """The number of rows of a whole validation: samples times `times`.

    The samples are the first `num_samples` of the source, or all if it has fewer.
    """
    return min(num_samples, len(source.dataset.samples)) * len(times)


def fixed_batches(
    source: BatchSource,
    fixed: FixedRows,
    *,
    batch: int,
    positions: tuple[int, ...],
    times: tuple[float, ...],
    held: HeldSizes | None = None,
    group: tuple[int, ...] = (),
) -> Iterator[dict[str, Tensor]]:
    """Yields the validation batches of one rank by name: the same samples, times and noise whenever it is called.

    Row r of the validation is sample r // len(times) at times[r % len(times)]; batch b holds the rows b * batch up to
    (b + 1) * batch of `fixed`. Pictures are cropped at the centre; nothing is flipped or dropped.

    `fixed`: the rows of the validation. `positions`: the rank's own rows in a batch. `held`: the sizes of the samples;
    None where all have one size. `group`: with `held`, the positions of all rows of this rank's pipeline.

    Raises, while iterating:
        DataError: for a sample that cannot be read.
    """

    def made(of: BatchSource, numbers: Sequence[int]) -> dict[str, Tensor]:
        rows = Rows(
            samples=tuple(number // len(times) for number in numbers),
            positions=tuple(numbers),
            step=0,
            purpose="validation.",
            times=tuple(times[number % len(times)] for number in numbers),
        )
        # The whole picture, neither mirrored nor dropped.
        return make_batch(replace(of, augmentation=Augmentation()), rows)

    for start in range(0, len(fixed.rows), batch):
        own = [fixed.rows[start + position] for position in positions]
        if held is None:
            yield made(source, own)
            continue
        # Of all rows of the pipeline: stages run rows that other ranks encode.
        sizes = [held.numbers[fixed.rows[start + position] // len(times)] for position in group]
        runs = groupby(own, lambda row: held.numbers[row // len(times)])
        yield joined_runs(sizes, [made(held.sources[size], tuple(rows)) for size, rows in runs])

"""Samples of several sizes: the raw inputs of each size, and batches that consist of runs of rows of one size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.ir.cells import rows_by_size
from diffusionpipe.ir.size import Clip
from diffusionpipe.runtime.compute.runs import joined_runs
from diffusionpipe.runtime.job.agreement import agree
from diffusionpipe.trainer.data.batches.batch import BatchSource, Rows, Turn, make_batch, turns_of
from diffusionpipe.trainer.data.batches.patch_order import PatchOrder
from diffusionpipe.trainer.data.decoding.clips import is_clip
from diffusionpipe.trainer.data.decoding.images import upright_size
from diffusionpipe.trainer.data.sizes.order import SizeOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSamples:
    """The order of samples of several sizes, and a source of batches for each size."""

    order: SizeOrder | PatchOrder
    """The endless order of the samples, with the size at each position."""
    numbers: tuple[int, ...]
    """For each size of the order, its index among the sizes that the model is built for."""
    sources: tuple[BatchSource, ...]
    """The source of batches of each size that the model is built for."""
    pipelines: int = 0
    """The number of equal parts of a step's batch in each of which rows are sorted by size; 0: rows are in the order of
    positions."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples at each size that the model is built for, in the model's order of sizes."""
        order = self.order
        own = order.assignment.parts(order.sizes) if isinstance(order, SizeOrder) else order.shares
        parts = dict(zip(self.numbers, own, strict=True))
        return tuple(parts.get(number, 0.0) for number in range(len(self.sources)))


def sized(
    source: BatchSource,
    order: SizeOrder | PatchOrder,
    inputs: Mapping[Clip, tuple[TensorSpec, ...]],
    mean_pixels: float | None = None,
) -> SizedSamples:
    """The order of samples together with a source of batches for each size.

    `inputs`: the raw inputs for each size, in the model's order of sizes.

    `mean_pixels`: the number of pixels of a sample that has weight 1 in the loss; others have a weight in proportion to
    their pixels. None: all have weight 1.
    """
    built = list(inputs)
    return SizedSamples(
        order=order,
        numbers=tuple(built.index(size) for size in order.sizes),
        sources=tuple(
            replace(source, inputs=own, size_weight=size.num_pixels / mean_pixels if mean_pixels else 1.0)
            for size, own in inputs.items()
        ),
    )


def samples_in_rows(sizes: SizedSamples, *, batch: int, step: int, rows: Sequence[int]) -> tuple[int, ...]:
    """For each of these rows of a step's global batch, the position of its sample in the batch.

    The two differ where rows are sorted by size within each pipeline's part of the batch.
    """
    if not sizes.pipelines:
        return tuple(rows)
    count = batch // sizes.pipelines
    place_of: dict[int, int] = {}
    for first in {row // count * count for row in rows}:  # the first row of each pipeline's part
        start = step * batch + first
        own = [sizes.numbers[size] for size in sizes.order.size_numbers(range(start, start + count))]
        place_of |= {first + row: first + place for row, place in enumerate(rows_by_size(own))}
    return tuple(place_of[row] for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSizes:
    """The size of each held-out sample, and a source of batches for each size."""

    numbers: tuple[int, ...]
    """For each sample, the index of its size among the sizes that the model is built for."""
    sources: tuple[BatchSource, ...]
    """The source of batches of each size that the model is built for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """The rows of a validation, batch after batch; row r is sample r // times at time r % times."""

    rows: tuple[int, ...]
    """The numbers r of the rows, in the order of the batches."""
    counts: tuple[bool, ...]
    """Whether each row counts in the mean; the others fill up micro-batches and the last batch."""


def fixed_rows(num_rows: int, *, times: int, batch: int, cell: int = 1, held: HeldSizes | None = None) -> FixedRows:
    """The rows of a validation: every row once, in micro-batches of `cell` rows of one size, and rows that fill up.

    `num_rows`: the number of samples times `times`. `held`: the sizes of the samples; None where all have one size.

    >>> held = HeldSizes(numbers=(0, 1, 0), sources=())
    >>> fixed_rows(3, times=1, batch=4, cell=2, held=held).rows
    (0, 2, 1, 1)
    """
    rows: list[int] = []
    counts: list[bool] = []
    numbers = [0] * num_rows if held is None else [held.numbers[row // times] for row in range(num_rows)]
    for size in sorted(set(numbers)):
        own = [row for row in range(num_rows) if numbers[row] == size]
        # With rows of the same size, because a micro-batch has one.
        filled = -len(own) % cell if held is not None else 0
        rows += own + [own[place % len(own)] for place in range(filled)]
        counts += [True] * len(own) + [False] * filled
    # The first rows again, whole cells of them, so that each cell keeps one size.
    filled = -len(rows) % batch
    counts += [False] * filled
    rows += [rows[place % len(rows)] for place in range(filled)]
    return FixedRows(rows=tuple(rows), counts=tuple(counts))


_COMPARED = 256
"""The number of runs at the start whose sizes all ranks compare; later ones follow from the same rule."""


def agree_on_sizes(order: SizeOrder | PatchOrder) -> None:
    """Refuses to train if ranks disagree on the sizes of samples, before a rank waits for a message of another shape.

    Every rank calls it; the first 256 runs of one size are compared.

    Raises:
        ConfigError: on every rank; it names both sizes.
    """
    own = [str(order.sizes[number]) for number in order.size_numbers(range(0, _COMPARED * order.run, order.run))]
    texts = agree(lambda: "; ".join(own))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            pairs = zip(texts[0].split("; "), text.split("; "), strict=True)
            run, (first, other) = next((run, pair) for run, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ConfigError(
                f"the ranks do not agree on the sizes of samples: from sample {run * order.run} on rank 0 has {first}, "
                f"rank {rank} has {other}; use one version of DiffusionPipe and of numpy on all machines"
            )


def _check_files(source: BatchSource, samples: Sequence[int]) -> None:
    """Refuses pictures whose size differs from the size that rank 0 has read from their headers.

    Raises:
        DataError: names both sizes.
    """
    for sample in samples:
        path, expected = source.dataset.path(sample), source.dataset.samples[sample].size
        if is_clip(path):  # the size of its first frame is known where it is decoded
            continue
        try:
            found = upright_size(path)
        except (OSError, ValueError):  # the decoder says more
            continue
        if expected and found != expected:
            raise DataError(
                f"{path} has {found[0]} x {found[1]} pixels here, and {expected[0]} x {expected[1]} where rank 0 has "
                "read it; give all machines the same pictures"
            )


def turns_at(
    source: BatchSource, sizes: SizedSamples | None, *, batch: int, step: int, positions: Sequence[int]
) -> tuple[Turn, ...]:
    """The samples in some rows of a step's global batch, with the number of times that each was seen before.

    `positions`: the rows.

    `sizes`: the order of samples of several sizes; None for the source's own order.
    """
    if sizes is not None:
        positions = samples_in_rows(sizes, batch=batch, step=step, rows=positions)
        places = (sizes.order.at(step * batch + position) for position in positions)
        return tuple(Turn(place.sample, place.epoch) for place in places)
    count, growth = len(source.dataset.samples), source.dataset.growth
    return turns_of(count, seed=source.seed, batch=batch, step=step, positions=positions, growth=growth)


def sized_batch(
    sizes: SizedSamples, *, batch: int, step: int, positions: Sequence[int], group: Sequence[int], has_levels: bool
) -> dict[str, Tensor]:
    """The raw inputs by name of some rows of a step's global batch, as runs of rows of one size.

    `positions`: the rows. `group`: all rows of the pipeline's batch; the result has the size of each.

    Raises:
        DataError: a picture cannot be decoded and is not replaced, or has another size than on rank 0.
    """
    start, order = step * batch, sizes.order
    positions, group = (samples_in_rows(sizes, batch=batch, step=step, rows=rows) for rows in (positions, group))
    runs = []
    placed = [(position, order.at(start + position)) for position in positions]
    for size, own in groupby(placed, lambda one: one[1].size):
        places, found = zip(*own, strict=True)
        _check_files(sizes.sources[0], [one.sample for one in found])
        rows = Rows(
            samples=tuple(one.sample for one in found),
            passes=tuple(one.epoch for one in found),
            positions=places,  # random numbers belong to the sample's position, in whichever row it is
            step=step,
        )
        runs.append(make_batch(sizes.sources[sizes.numbers[size]], rows, has_levels=has_levels))
    numbers = order.size_numbers([start + position for position in group])
    return joined_runs([sizes.numbers[number] for number in numbers], runs)

"""The loss on held-out samples at fixed times, through the pipeline's forward-only schedule."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from diffusionpipe.runtime.engine.executor import cells_of
from diffusionpipe.trainer.data.batches.batch import BatchSource
from diffusionpipe.trainer.data.batches.loader import fixed_batches, num_fixed_rows
from diffusionpipe.trainer.data.batches.sized import FixedRows, HeldSizes, fixed_rows
from diffusionpipe.trainer.setup.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Mean losses over the held-out samples: of all, by time of the noise, and by backbone."""

    loss: float
    """The mean loss of all samples at all times."""
    by_time: tuple[tuple[float, float], ...]
    """The mean loss at each time of the noise, as (time, loss)."""
    by_backbone: tuple[tuple[str, float], ...]
    """The mean loss of each backbone, as (name, loss); `loss` is their sum."""


def validate(session: Session, source: BatchSource, held: HeldSizes | None = None) -> ValidationResult:
    """The mean losses of the held-out samples of `source`, with averaged weights where the run has them.

    Every rank calls it. `held`: the sizes of the samples; None where all have one size.
    """
    settings = session.recipe.validation
    times = settings.timesteps
    num_rows = num_fixed_rows(source, times=times, num_samples=settings.samples)
    cell = max(len(rows) for rows in cells_of(session.plan.validate))
    fixed = fixed_rows(num_rows, times=len(times), batch=session.plan.batch, cell=cell, held=held)
    batches = fixed_batches(
        source,
        fixed,
        held=held,
        group=session.group_positions,
        batch=session.plan.batch,
        positions=session.encoded_positions(session.plan.validate),
        times=times,
    )
    backbones = session.model.backbones
    # (backbones, times)
    sums = torch.zeros(len(backbones), len(times), dtype=torch.float64)
    with averaged(session):
        for number, inputs in enumerate(batches):
            _add_losses(session, inputs, number * session.plan.batch, fixed, sums)
    sums = sums.to(session.job.device)
    dist.all_reduce(sums)  # each loss is on one rank
    counts = [len(range(index, num_rows, len(times))) for index in range(len(times))]
    by_time = [total / count for total, count in zip(sums.sum(0).tolist(), counts, strict=True)]
    return ValidationResult(
        loss=float(sums.sum()) / num_rows,
        by_time=tuple(zip(times, by_time, strict=True)),
        by_backbone=tuple(
            (one.name, total / num_rows) for one, total in zip(backbones, sums.sum(1).tolist(), strict=True)
        ),
    )


def _add_losses(session: Session, inputs: dict[str, Tensor], start: int, fixed: FixedRows, sums: Tensor) -> None:
    """Runs one validation batch, and adds the losses that this rank gets to `sums`, (backbones, times).

    `start`: the index in `fixed` of the batch's first row. Row r has time r modulo the number of times.
    """
    worker = session.worker
    number = {backbone.loss: i for i, backbone in enumerate(session.model.backbones)}
    worker.feed(worker.validate, inputs)
    for output in worker.validate.run():
        positions = session.positions_of(output.rows.start, output.rows.stop)
        for position, loss in zip(positions, output.value.tolist(), strict=True):
            if fixed.counts[start + position]:  # else the row only fills up a micro-batch
                sums[number[output.name], fixed.rows[start + position] % sums.shape[1]] += loss


@contextmanager
def averaged(session: Session) -> Iterator[None]:
    """A context in which the averaged weights are in place of the trained ones; without an average nothing changes.

    Every rank of the job calls it.
    """
    with session.ema.swapped() if session.ema is not None else nullcontext():
        session.worker.bring_weights()  # ranks that update a part of the weights and hold all get the other parts
        yield

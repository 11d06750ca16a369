"""Frozen work of the batch, before its first forward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Fill, Op, Pipeline, Placement, Range, Schedule, Share, Stage
from diffusionpipe.passes.frozen_edges import reading_frozen


def insert_encoding(
    schedule: Schedule,
    *,
    block: int,
    outputs: Mapping[int, tuple[str, ...]],
    num_layers: int,
    shares: Sequence[Share | None] | None = None,
    max_chunk: int,
    runs: Sequence[tuple[Range, int]] = (),
) -> Schedule:
    """The schedule with a frozen pipeline whose fills run first on every worker.

        worker 0   ENCODE ENCODE | F F B ...      each worker encodes its own rows of the batch, in chunks,
        worker 1   ENCODE ENCODE |   F B ...      and every stage reads the rows of its micro-batches from all of them

    Args:
        schedule: compute only; its trained pipelines read one batch.
        block: the frozen layers' block id, which becomes the `weights` of the encoder stages.
        outputs: block id of a stage -> the frozen tensors that it reads; blocks that read none may be absent.
        num_layers: layers of the frozen block; 0 where raw inputs are only passed on.
        shares: by worker, the part of the batch that it encodes, or None for nothing. None in place of all shares means
            equal parts, as far as whole samples allow.
        max_chunk: the most samples in one fill.
        runs: (layers, most samples of a fill) of each run of fills, one after the other; (): one run of all layers with
            `max_chunk`.

    Raises:
        ScheduleError: messages are explicit already.
        ConfigError: sizes are below 1, or the shares do not cut the batch.
    """
    if schedule.has_communication:
        raise ScheduleError(["insert the encoding before the messages are made explicit"])
    old = schedule.placement
    rows = _rows(old, shares, max_chunk=max_chunk, num_layers=num_layers)
    batch = old.num_samples
    first = len(old.stages)
    encoders = {first + i: (worker, part) for i, (worker, part) in enumerate(rows.items())}
    stages = tuple(
        Stage(worker=worker, weights=block, share=Share(Fraction(part.start, batch), Fraction(part.stop, batch)))
        for worker, part in encoders.values()
    )
    frozen = Pipeline(stages=tuple(encoders), microbatches=(batch,), ops=frozenset({Op.ENCODE}), model="frozen")
    pipelines = tuple(reading_frozen(pipeline, old, outputs, tuple(encoders)) for pipeline in old.pipelines)
    fills = list(schedule.fills)
    orders = list(schedule.orders)
    for stage, (worker, part) in encoders.items():
        own = [
            Fill(stage=stage, component="", layers=layers, samples=chunk)
            for layers, most in runs or [(Range(0, num_layers), max_chunk)]
            for chunk in _chunks(part, most)
        ]
        encodes = [Action(stage=stage, op=Op.ENCODE, slot=len(fills) + i) for i in range(len(own))]
        fills += own
        orders[worker] = (*encodes, *orders[worker])
    placement = Placement(stages=old.stages + stages, pipelines=(*pipelines, frozen))
    return replace(schedule, placement=placement, orders=tuple(orders), fills=tuple(fills))


def _rows(
    placement: Placement, shares: Sequence[Share | None] | None, *, max_chunk: int, num_layers: int
) -> dict[int, Range]:
    """Worker -> the rows of the batch that it encodes; workers without any are absent."""
    if max_chunk < 1 or num_layers < 0:
        raise ConfigError(f"max_chunk={max_chunk}, num_layers={num_layers}: at least 1 and at least 0 are needed")
    num_workers, batch = placement.num_workers, placement.num_samples
    if shares is None:
        # Borders are rounded down, so the parts differ by one sample at most and leave no gap.
        borders = [batch * worker // num_workers for worker in range(num_workers + 1)]
        parts = {worker: Range(borders[worker], borders[worker + 1]) for worker in range(num_workers)}
    else:
        parts = _cut(batch, shares, num_workers)
    return {worker: part for worker, part in parts.items() if part}


def _cut(batch: int, shares: Sequence[Share | None], num_workers: int) -> dict[int, Range]:
    if len(shares) != num_workers:
        raise ConfigError(f"{len(shares)} shares for {num_workers} workers; give one per worker, None for nothing")
    try:
        parts = {worker: share.samples(batch) for worker, share in enumerate(shares) if share is not None}
    except ValueError as error:
        raise ConfigError(f"shares of the frozen work: {error}") from error
    position = 0
    for part in sorted(parts.values(), key=lambda part: part.start):
        if part.start != position:
            raise ConfigError(f"shares of the frozen work leave a gap or overlap at sample {position} of {batch}")
        position = part.stop
    if position != batch:
        raise ConfigError(f"shares of the frozen work end at sample {position} of {batch}")
    return parts


def _chunks(part: Range, max_chunk: int) -> Iterator[Range]:
    for start in range(part.start, part.stop, max_chunk):
        yield Range(start, min(start + max_chunk, part.stop))

"""Frozen work of the next batch, at chosen places between the compute of this one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Fill, Op, Pipeline, Range, Schedule, Share, Stage
from diffusionpipe.ir.action import PRESENT, Reading
from diffusionpipe.passes.frozen_edges import reading_frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFill:
    """Frozen work that a worker does at a place in its order: some layers on some samples."""

    position: int
    """Index into the worker's order without fills: the fill runs before that action; the order's length: at its end."""
    component: str
    """The name of the component for people, as in `Fill`."""
    layers: Range
    """Layers, counted within the frozen block."""
    samples: Range
    """The range of the batch's samples that the fill encodes."""


def insert_fills(
    schedule: Schedule,
    fills: Mapping[int, Sequence[PlacedFill]],
    *,
    block: int,
    outputs: Mapping[int, tuple[str, ...]],
) -> Schedule:
    """The schedule with fills at these places, in a new frozen pipeline that encodes the next iteration's batch.

    In a window they encode the batch that begins in the window after this one at the earliest.

        worker 0   F0 F1 [vae 0:8] B0 F2 ...        samples 0 to 8 of the next batch in a bubble of this one
        worker 1   [text 8:16] F0 B0 ...

    Args:
        schedule: compute only, without any frozen pipeline.
        fills: worker -> its fills in the order in which they run. The samples of one worker are one range, all workers
            together cover the batch.
        block: the frozen layers' block id, which becomes the `weights` of the encoder stages.
        outputs: block id of a stage -> the frozen tensors that it reads; blocks that read none may be absent.

    Raises:
        ScheduleError: messages are explicit already.
        ConfigError: positions or samples do not fit the schedule.
    """
    if schedule.has_communication:
        raise ScheduleError(["insert the fills before the messages are made explicit"])
    placement = schedule.placement
    batch = placement.num_samples
    workers = [worker for worker in sorted(fills) if fills[worker]]
    parts = {worker: _part(fills[worker], worker) for worker in workers}
    _check_parts(list(parts.values()), batch)
    first = len(placement.stages)
    encoders = {worker: first + i for i, worker in enumerate(workers)}
    stages = tuple(
        Stage(worker=w, weights=block, share=Share(Fraction(parts[w].start, batch), Fraction(parts[w].stop, batch)))
        for w in workers
    )
    frozen = Pipeline(
        stages=tuple(encoders.values()),
        microbatches=(batch,),
        ops=frozenset({Op.ENCODE}),
        model="frozen",
        is_ahead=True,
    )
    orders = list(schedule.orders)
    all_fills = list(schedule.fills)
    # Batches up to the one of the leading forwards are being read; the next one is the first whose rows are free.
    reading = Reading(lead=schedule.lead + 1) if schedule.lead else PRESENT
    for worker in workers:
        orders[worker] = _merged(orders[worker], fills[worker], encoders[worker], all_fills, reading)
    readers = (reading_frozen(pipeline, placement, outputs, frozen.stages) for pipeline in placement.pipelines)
    return replace(
        schedule,
        placement=replace(placement, stages=placement.stages + stages, pipelines=(*readers, frozen)),
        orders=tuple(orders),
        fills=tuple(all_fills),
    )


def _part(fills: Sequence[PlacedFill], worker: int) -> Range:
    positions = [fill.position for fill in fills]
    if positions != sorted(positions):
        raise ConfigError(f"the fills of worker {worker} are not in the order of their places: {positions}")
    return Range(min(fill.samples.start for fill in fills), max(fill.samples.stop for fill in fills))


def _check_parts(parts: Sequence[Range], batch: int) -> None:
    reached = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start != reached:
            raise ConfigError(f"the fills of all workers leave a gap or overlap at sample {reached} of {batch}")
        reached = part.stop
    if reached != batch:
        raise ConfigError(f"the fills of all workers end at sample {reached} of {batch}")


def _merged(
    order: Sequence[Action], fills: Sequence[PlacedFill], encoder: int, all_fills: list[Fill], reading: Reading
) -> tuple[Action, ...]:
    """The order with ENCODE actions at their places; the fills are appended to `all_fills`."""
    merged: list[Action] = []
    reached = 0
    for fill in fills:
        if fill.position > len(order):
            raise ConfigError(f"a fill is placed before action {fill.position} of an order of {len(order)}")
        merged += order[reached : fill.position]
        reached = fill.position
        merged.append(Action(stage=encoder, op=Op.ENCODE, slot=len(all_fills), reading=reading))
        all_fills.append(Fill(stage=encoder, component=fill.component, layers=fill.layers, samples=fill.samples))
    return (*merged, *order[reached:])


def prologue(schedule: Schedule) -> Schedule:
    """The schedule that encodes the first batch, before the first iteration of `schedule`, which works ahead.

    It has the same fills in the same chunks on the same workers, with their messages, so the first batch is encoded bit
    for bit as all others.
    """
    placement = schedule.placement
    encoders = {s for p in placement.pipelines if Op.ENCODE in p.ops for s in p.stages}
    kept = tuple(slot for slot, message in enumerate(schedule.messages) if message.source in encoders)
    number = {slot: i for i, slot in enumerate(kept)}
    pipelines = tuple(
        pipeline
        if Op.ENCODE in pipeline.ops
        else replace(
            pipeline, ops=frozenset(), edges=tuple(edge for edge in pipeline.edges if edge.producer in encoders)
        )
        for pipeline in placement.pipelines
    )
    orders = tuple(tuple(_renumbered(order, number)) for order in schedule.orders)
    return replace(
        schedule,
        name=f"{schedule.name}-prologue",
        placement=replace(placement, pipelines=pipelines),
        orders=orders,
        messages=tuple(schedule.messages[slot] for slot in kept),
    )


def encoding_of(schedule: Schedule) -> Schedule:
    """The schedule that only encodes a batch, with the fills and messages of `schedule`.

    `schedule` encodes each batch before its first forward.
    """
    placement = schedule.placement
    # As if it worked ahead: then no action of this iteration is waited for or waits, and trained stages only receive.
    pipelines = tuple(replace(p, is_ahead=Op.ENCODE in p.ops) for p in placement.pipelines)
    return prologue(replace(schedule, placement=replace(placement, pipelines=pipelines)))


def _renumbered(order: Sequence[Action], number: Mapping[int, int]) -> Iterator[Action]:
    """The ENCODE actions of an order, and its sends and receives of the messages in `number`, by their new numbers."""
    for action in order:
        if action.op is Op.ENCODE:
            yield action
        elif action.slot is not None and action.slot in number:
            yield replace(action, slot=number[action.slot])

"""What must have happened elsewhere before an action can run: the edges of a placement, micro-batch by micro-batch.

This is the one statement of the rules of data flow. The checker, the simulator and the communication pass all read it.

    edge 0 -> 2 with a gradient      F of stage 2 after F of stage 0     (an activation)
                                     B of stage 0 after B of stage 2     (its gradient; I instead of B where split)
    edge from an encoder stage       F after every ENCODE of the rows that the micro-batch reads;
                                     if it works ahead, F of the next iteration, so nothing waits in this one
    with T (self-conditioning)       T after T along the pipeline; F after T along an edge that leads back
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from diffusionpipe.ir.action import COMPUTE_OPS, Action, Op, compute_action
from diffusionpipe.ir.placement import Edge, Pipeline, Range, Stage
from diffusionpipe.ir.schedule import Message, Schedule

TIMED_OPS = COMPUTE_OPS | {Op.ENCODE}
"""Ops that occupy the worker itself; all others run beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Samples of named tensors that one action reads from others."""

    producers: tuple[Action, ...]
    """Actions of the source that must have ended: one, or for frozen outputs all fills of these samples."""
    consumer: Action
    source: int
    """The stage that the tensors come from; for a gradient the stage that read the activation."""
    destination: int
    microbatch: int
    """As in `Message`: counted in the source's pipeline, 0 for frozen outputs."""
    samples: Range
    """As in `Message`: of that micro-batch; of the whole batch for frozen outputs. Never empty."""
    tensors: tuple[str, ...]
    is_gradient: bool = False
    is_frozen: bool = False
    is_ahead: bool = False
    """Whether the consumer reads in the next iteration: a message must arrive, but no action here waits for it."""


def backward_op(pipeline: Pipeline) -> Op | None:
    """The op that yields the gradients of a stage's inputs, if the pipeline has one."""
    return Op.B if Op.B in pipeline.ops else Op.I if Op.I in pipeline.ops else None


def ends(message: Message, slot: int) -> tuple[Action, Action]:
    """The SEND and the RECV of message number `slot`."""
    send, recv = (Op.SEND_B, Op.RECV_B) if message.is_gradient else (Op.SEND_F, Op.RECV_F)
    return (
        Action(stage=message.source, op=send, microbatch=message.microbatch, slot=slot),
        Action(stage=message.destination, op=recv, microbatch=message.microbatch, slot=slot),
    )


def flows(schedule: Schedule) -> tuple[Flow, ...]:
    """Every flow of the schedule, pipeline by pipeline, edge by edge, micro-batch by micro-batch.

    Where two stages' shares do not meet nothing flows. Trusts the placement: `check` looks at it first.
    """
    frozen = {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}
    fills: dict[int, list[tuple[Action, Range]]] = defaultdict(list)
    for slot, fill in enumerate(schedule.fills):
        if fill.samples:
            fills[fill.stage].append((Action(stage=fill.stage, op=Op.ENCODE, slot=slot), fill.samples))
    found: list[Flow] = []
    for pipeline in schedule.placement.pipelines:
        rows: dict[int, list[Range]] = {}
        for edge in pipeline.edges:
            if edge.producer in frozen:
                if edge.consumer not in rows:
                    rows[edge.consumer] = _rows(pipeline, schedule.placement.stages[edge.consumer])
                found.extend(_frozen_flows(schedule, pipeline, edge, rows[edge.consumer], fills[edge.producer]))
            elif pipeline.ops:
                found.extend(_trained_flows(schedule, pipeline, edge))
    return tuple(found)


def _rows(pipeline: Pipeline, stage: Stage) -> list[Range]:
    """For each micro-batch the stage's samples of it, counted within the batch."""
    samples = {size: stage.share.samples(size) for size in set(pipeline.microbatches)}
    starts = accumulate(pipeline.microbatches, initial=pipeline.first_sample)
    return [samples[size].shifted(start) for size, start in zip(pipeline.microbatches, starts, strict=False)]


def _trained_flows(schedule: Schedule, pipeline: Pipeline, edge: Edge) -> Iterator[Flow]:
    stages = schedule.placement.stages
    backward = backward_op(pipeline)
    is_ahead = pipeline.stages.index(edge.producer) < pipeline.stages.index(edge.consumer)
    ends = {size: _common(stages, edge, size) for size in set(pipeline.microbatches)}
    for microbatch, size in enumerate(pipeline.microbatches):
        if not (samples := ends[size]):
            continue
        for first, second in _forward_ops(pipeline, is_ahead=is_ahead):
            yield Flow(
                producers=(compute_action(edge.producer, first, microbatch),),
                consumer=compute_action(edge.consumer, second, microbatch),
                source=edge.producer,
                destination=edge.consumer,
                microbatch=microbatch,
                samples=samples,
                tensors=edge.tensors,
            )
        if backward is not None and edge.gradients:
            yield Flow(
                producers=(compute_action(edge.consumer, backward, microbatch),),
                consumer=compute_action(edge.producer, backward, microbatch),
                source=edge.consumer,
                destination=edge.producer,
                microbatch=microbatch,
                samples=samples,
                tensors=edge.gradients,
                is_gradient=True,
            )


def _common(stages: tuple[Stage, ...], edge: Edge, size: int) -> Range:
    producer, consumer = stages[edge.producer], stages[edge.consumer]
    return producer.share.samples(size).intersection(consumer.share.samples(size))


def _forward_ops(pipeline: Pipeline, *, is_ahead: bool) -> list[tuple[Op, Op]]:
    if Op.T not in pipeline.ops:
        return [(Op.F, Op.F)]
    return [(Op.T, Op.T), (Op.F, Op.F)] if is_ahead else [(Op.T, Op.F)]


def _frozen_flows(
    schedule: Schedule,
    pipeline: Pipeline,
    edge: Edge,
    read: Sequence[Range],
    fills: Sequence[tuple[Action, Range]],
) -> Iterator[Flow]:
    """`read`: the consumer's samples by micro-batch; `fills`: those of the producer, with their samples."""
    encoded = schedule.placement.rows(edge.producer, 0)
    is_ahead = schedule.placement.pipeline_of(edge.producer).is_ahead
    for microbatch, rows in enumerate(read):
        if rows.stop <= encoded.start or encoded.stop <= rows.start:
            continue
        samples = rows.intersection(encoded)
        start, stop = samples.start, samples.stop
        producers = tuple(action for action, part in fills if part.start < stop and start < part.stop)
        for op in (Op.T, Op.F) if Op.T in pipeline.ops else (Op.F,):
            yield Flow(
                producers=producers,
                consumer=compute_action(edge.consumer, op, microbatch),
                source=edge.producer,
                destination=edge.consumer,
                microbatch=0,
                samples=samples,
                tensors=edge.tensors,
                is_frozen=True,
                is_ahead=is_ahead,
            )

"""The edges of a placement, micro-batch by micro-batch: the events elsewhere for which an action waits.

This is the one statement of the rules of data flow. The checker, the simulator and the communication pass all read it.

    edge 0 -> 2 with a gradient      F of stage 2 after F of stage 0     (an activation)
                                     B of stage 0 after B of stage 2     (its gradient; I instead of B where split)
    edge from a probe's last stage   F of the first stage after F of the probe, of the micro-batches that it runs
    edge from an encoder stage       F after every ENCODE of the rows that the micro-batch reads;
                                     if it works ahead, F of the next iteration, so nothing waits in this one
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile

from diffusionpipe.ir.action import COMPUTE_OPS, Action, Op, compute_action
from diffusionpipe.ir.placement import WHOLE, Edge, Pipeline, Range, Stage
from diffusionpipe.ir.schedule import Message, Schedule

TIMED_OPS = COMPUTE_OPS | {Op.ENCODE}
"""Ops for which the worker itself computes; all others run beside its computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Samples of named tensors that one action reads from others: one micro-batch's part of an edge."""

    producers: tuple[Action, ...]
    """Actions of the source that must have ended: one, or for frozen outputs all fills of these samples."""
    consumer: Action
    """The action that reads the tensors."""
    source: int
    """The stage that the tensors come from; for a gradient the stage that read the activation."""
    destination: int
    """The stage that reads the tensors."""
    microbatch: int
    """Number of the micro-batch, counted in the source's pipeline as in `Message`; 0 for frozen outputs."""
    samples: Range
    """The samples that flow, of that micro-batch as in `Message`; of the whole batch for frozen outputs. Never empty.
    """
    tensors: tuple[str, ...]
    is_gradient: bool = False
    is_frozen: bool = False
    is_ahead: bool = False
    """Whether the consumer reads in the next iteration: a message must arrive, but no action here waits for it."""


def backward_op(pipeline: Pipeline) -> Op | None:
    """The op that gives the gradients of a stage's inputs: B, or I in split backwards; None without backwards."""
    return Op.B if Op.B in pipeline.ops else Op.I if Op.I in pipeline.ops else None


def ends(message: Message, slot: int) -> tuple[Action, Action]:
    """The SEND and the RECV action of `message`; `slot` is its index in `Schedule.messages`."""
    send, recv = (Op.SEND_B, Op.RECV_B) if message.is_gradient else (Op.SEND_F, Op.RECV_F)
    return (
        Action(stage=message.source, op=send, microbatch=message.microbatch, slot=slot),
        Action(stage=message.destination, op=recv, microbatch=message.microbatch, slot=slot),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """All that a trained stage reads of another one: the flows of all micro-batches over one edge in one direction."""

    source: int
    """The stage that the tensors come from; for a gradient the stage that read the activation."""
    destination: int
    """The stage that reads the tensors."""
    op: Op
    """The op of the source that must have ended, and of the destination that reads, both of the same micro-batch."""
    tensors: tuple[str, ...]
    is_gradient: bool
    microbatches: tuple[int, ...]
    """The number of samples of each micro-batch of the pipeline."""
    numbers: range
    """The micro-batches of which tensors flow: all, or for a probe the ones that it runs."""
    samples: Mapping[int, Range]
    """Size of a micro-batch in samples -> the range of its samples that flow; never empty."""

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(number, number of samples) of each micro-batch of which tensors flow."""
        return ((number, self.microbatches[number]) for number in self.numbers)


def feeds(schedule: Schedule) -> Iterator[tuple[Feed, ...]]:
    """The feeds of all trained pipelines, one tuple for each edge between trained stages.

    A tuple has the feed of the activations and, if gradients return, the feed of the gradients. It is empty where the
    shares of the two stages have no samples in common.
    """
    frozen = _frozen_stages(schedule)
    for pipeline in schedule.placement.pipelines:
        whole = {size: Range(0, size) for size in set(pipeline.microbatches)}
        for edge in pipeline.edges if pipeline.ops else ():
            if edge.producer not in frozen:
                yield tuple(_trained_feeds(schedule, pipeline, edge, whole))


def frozen_flows(schedule: Schedule) -> Iterator[Flow]:
    """The flows of frozen outputs from encoder stages to trained stages, edge by edge, micro-batch by micro-batch.

    None without frozen stages.
    """
    frozen = _frozen_stages(schedule)
    if not frozen:
        return
    actions: dict[int, list[tuple[Action, Range]]] = defaultdict(list)
    for slot, fill in enumerate(schedule.fills):
        if fill.samples:
            actions[fill.stage].append((Action(stage=fill.stage, op=Op.ENCODE, slot=slot), fill.samples))
    fills = {stage: _Fills(actions[stage]) for stage in frozen}
    for pipeline in schedule.placement.pipelines:
        rows: dict[int, list[tuple[int, Range]]] = {}
        for edge in pipeline.edges:
            if edge.producer in frozen:
                if edge.consumer not in rows:
                    rows[edge.consumer] = _rows(pipeline, schedule.placement.stages[edge.consumer])
                yield from _frozen_flows(schedule, pipeline, edge, rows[edge.consumer], fills[edge.producer])


class _Fills:
    """The ENCODE actions of one encoder stage, which can be looked up by the samples that they encode."""

    def __init__(self, fills: Sequence[tuple[Action, Range]]) -> None:
        self._fills = fills
        self._by_start = sorted(range(len(fills)), key=lambda place: fills[place][1].start)
        self._starts = [fills[place][1].start for place in self._by_start]
        self._longest = max((len(samples) for _, samples in fills), default=0)

    def with_any(self, samples: Range) -> tuple[Action, ...]:
        """The ENCODE actions of the fills with any of these samples, in the order of their slots."""
        # A fill that starts there or earlier ends before the samples, as none is longer than the longest.
        first = bisect_right(self._starts, samples.start - self._longest)
        stop = bisect_left(self._starts, samples.stop)
        places = sorted(place for place in self._by_start[first:stop] if self._fills[place][1].stop > samples.start)
        return tuple(self._fills[place][0] for place in places)


def flows(schedule: Schedule) -> tuple[Flow, ...]:
    """Every flow of the schedule: from trained stages, micro-batch by micro-batch, then from encoders.

    The placement is not checked here; `timing.legal.check` does that.
    """
    found = [
        Flow(
            producers=(compute_action(feed.source, feed.op, microbatch),),
            consumer=compute_action(feed.destination, feed.op, microbatch),
            source=feed.source,
            destination=feed.destination,
            microbatch=microbatch,
            samples=feed.samples[size],
            tensors=feed.tensors,
            is_gradient=feed.is_gradient,
        )
        for of_edge in feeds(schedule)
        if of_edge
        for microbatch, size in of_edge[0].sizes()
        for feed in of_edge
    ]
    return (*found, *frozen_flows(schedule))


def _frozen_stages(schedule: Schedule) -> set[int]:
    return {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}


def _rows(pipeline: Pipeline, stage: Stage) -> list[tuple[int, Range]]:
    """(micro-batch that the pipeline runs, the stage's samples of it, counted within the batch), in order."""
    samples = {size: stage.share.samples(size) for size in set(pipeline.microbatches)}
    starts = list(accumulate(pipeline.microbatches, initial=pipeline.first_sample))
    return [(number, samples[pipeline.microbatches[number]].shifted(starts[number])) for number in pipeline.numbers]


def _trained_feeds(schedule: Schedule, pipeline: Pipeline, edge: Edge, whole: Mapping[int, Range]) -> Iterator[Feed]:
    """The feeds over one edge: of activations, then of gradients if they return; none if the shares do not overlap.

    `whole`: size of a micro-batch in samples -> the range of all its samples.
    """
    here, there = (schedule.placement.stages[stage].share for stage in (edge.producer, edge.consumer))
    if not here.overlaps(there):
        return
    # The usual case, without sums of Fractions. Shares of the whole are this one object.
    is_whole = here is WHOLE and there is WHOLE
    samples = whole if is_whole else {n: here.samples(n).intersection(there.samples(n)) for n in whole}
    found = [(edge.producer, edge.consumer, Op.F, edge.tensors, False)]
    backward = backward_op(pipeline)
    if backward is not None and edge.gradients:
        found.append((edge.consumer, edge.producer, backward, edge.gradients, True))
    for source, destination, op, tensors, is_gradient in found:
        yield Feed(
            source=source,
            destination=destination,
            op=op,
            tensors=tensors,
            is_gradient=is_gradient,
            microbatches=pipeline.microbatches,
            numbers=schedule.placement.pipeline_of(edge.producer).numbers,
            samples=samples,
        )


def _frozen_flows(
    schedule: Schedule,
    pipeline: Pipeline,
    edge: Edge,
    read: Sequence[tuple[int, Range]],
    fills: _Fills,
) -> Iterator[Flow]:
    """The flows of frozen outputs over one edge from an encoder stage, micro-batch by micro-batch.

    `read`: (micro-batch, samples) that the consumer reads, in order. `fills`: the actions of the encoder stage.
    """
    encoded = schedule.placement.rows(edge.producer, 0)
    is_ahead = schedule.placement.pipeline_of(edge.producer).is_ahead
    # The rows of micro-batches ascend, so those that meet the encoder's rows are one run of them.
    first = bisect_right(read, encoded.start, key=lambda row: row[1].stop)
    for microbatch, rows in takewhile(lambda row: row[1].start < encoded.stop, islice(read, first, None)):
        samples = rows.intersection(encoded)
        yield Flow(
            producers=fills.with_any(samples),
            consumer=compute_action(edge.consumer, Op.F, microbatch),
            source=edge.producer,
            destination=edge.consumer,
            microbatch=0,
            samples=samples,
            tensors=edge.tensors,
            is_frozen=True,
            is_ahead=is_ahead,
        )


def slots_of_edge(schedule: Schedule) -> dict[tuple[int, int, int, bool], list[int]]:
    """(source stage, destination stage, micro-batch, is_gradient) -> indices of its messages in `Schedule.messages`."""
    found: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        found[message.source, message.destination, message.microbatch, message.is_gradient].append(slot)
    return found


def slots_of_encoder(schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """(source stage, worker of the destination) -> indices of the messages between them in `Schedule.messages`.

    A worker receives an encoder's output once for all its stages.
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        found[message.source, schedule.placement.stages[message.destination].worker].append(slot)
    return found


def serving(schedule: Schedule, all_flows: Sequence[Flow]) -> dict[int, tuple[int, ...]]:
    """Index of each flow between two workers -> indices in `Schedule.messages` of the messages that carry its samples.

    A flow that no message carries has an empty tuple; flows inside a worker are left out.
    """
    stages = schedule.placement.stages
    of_edge, of_encoder = slots_of_edge(schedule), slots_of_encoder(schedule)
    served = {}
    for index, flow in enumerate(all_flows):
        worker = stages[flow.destination].worker
        if stages[flow.source].worker == worker:
            continue
        if flow.is_frozen:
            candidates = of_encoder.get((flow.source, worker), [])
        else:
            key = flow.source, flow.destination, flow.microbatch, flow.is_gradient
            candidates = of_edge.get(key, [])
        served[index] = tuple(s for s in candidates if schedule.messages[s].samples.overlaps(flow.samples))
    return served

"""Sends and receives, in an order that cannot deadlock.

One total order of everything decides. Compute actions stand in it by their simulated end. A message stands right
behind the later of two of them: the action that produces it, and the action at whose end the worker that reads it
has room for it. Every worker sorts its computes, sends and receives by that one order. 1F1B with p = m = 2, whose
messages 0 and 1 are activations, 2 and 3 gradients:

    total order   0F0  [0]  0F1  1F0  [1]  1B0  [2]  1F1  0B0  1B1  [3]  0B1
    worker 0      0F0   s0  0F1        s1        r2       0B0        r3  0B1
    worker 1            r0       1F0   r1  1B0   s2  1F1       1B1   s3

Why nothing can deadlock, even with unbuffered sends and one stream for many messages: let the least element of the
order that has not happened be x. Everything before it on its worker, on both its workers if it is a message, is less
than x, so it has happened. A compute's inputs are messages that are received before it, so they are less than x. A
message's streams hold before it only messages that are less than x. So x can happen. Ties are broken by one numbering
that respects all dependencies, so durations of zero do no harm, and neither does a timeline with clock errors.

Transfers that take no time change the start of no action: by the same induction a message is over when the action
that it stands behind ends, and in the timeline its reader starts no earlier than that.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Message, Op, Range, Schedule, Timeline
from diffusionpipe.ir.flows import TIMED_OPS, Flow, ends, feeds, frozen_flows
from diffusionpipe.timing import START, Graph, graph_of
from diffusionpipe.units import Seconds


def communicate(schedule: Schedule, timeline: Timeline, *, lookahead: int = 1) -> Schedule:
    """The compute-only schedule with explicit messages, ordered by its timeline.

    A message is posted at the earliest when its reader is `lookahead + 1` compute actions ahead on its worker: with 1
    it travels while the action before its reader runs, with 0 the worker waits for it. This bounds the receive
    buffers. An activation or gradient is one message for each edge and micro-batch. Frozen outputs are one message for
    each encoder stage, reading worker and micro-batch, with all tensors that the worker's stages read.

    Messages are numbered in the total order of the module's docstring.

    Raises:
        ConfigError: `lookahead` is negative.
        ScheduleError: messages are explicit already, the timeline is another schedule's, the schedule gets stuck, or
            a pipeline's T crosses workers.
    """
    if lookahead < 0:
        raise ConfigError(f"lookahead={lookahead}: the number of computes a message may be early starts at 0")
    if schedule.has_communication:
        raise ScheduleError(["messages are explicit already; communicate takes a compute-only schedule"])
    graph = graph_of(schedule)
    rank = _ranks(schedule, graph, timeline)
    windows = _windows(schedule, graph, lookahead)

    def place(transfer: _Transfer) -> int:
        produced = max(rank[producer] for producer in transfer.producers)
        if not transfer.consumers:  # read in the next iteration: it may come as soon as it is there
            return produced
        return max(produced, rank[windows[min(transfer.consumers, key=rank.__getitem__)]])

    placed = [(place(transfer), transfer.message) for transfer in _transfers(schedule, _Events(schedule, graph))]
    placed.sort(key=lambda pair: pair[0])  # stable: at equal places the order of the edges stays
    entries = _compute_entries(schedule, graph, rank)
    stages = schedule.placement.stages
    for slot, (behind, message) in enumerate(placed):
        send, recv = ends(message, slot)
        entries[stages[message.source].worker].append(((behind, 1, slot), send))
        entries[stages[message.destination].worker].append(((behind, 1, slot), recv))
    for worker in entries:
        worker.sort(key=lambda entry: entry[0])
    return replace(
        schedule,
        messages=tuple(message for _, message in placed),
        orders=tuple(tuple(action for _, action in worker) for worker in entries),
    )


@dataclass(frozen=True, slots=True)
class _Transfer:
    message: Message
    producers: Sequence[int]
    """Events."""
    consumers: Sequence[int]
    """The events of its readers in this iteration."""


class _Events:
    """The events of a schedule's computes and fills."""

    def __init__(self, schedule: Schedule, graph: Graph) -> None:
        self.computes: dict[tuple[int, Op], dict[int | None, int]] = defaultdict(dict)
        self.fills: dict[int | None, int] = {}
        for order, events in zip(schedule.orders, graph.events, strict=True):
            for action, event in zip(order, events, strict=True):
                if action.op is Op.ENCODE:
                    self.fills[action.slot] = event
                elif action.op in TIMED_OPS:
                    self.computes[action.stage, action.op][action.microbatch] = event


def _ranks(schedule: Schedule, graph: Graph, timeline: Timeline) -> list[int]:
    """By event its place among all, by the ends of the timeline; an event never stands before one that it waits for.

    Only computes and fills have places of their own; the start has -1.
    """
    found: dict[Action, Seconds] = {span.action: span.end for span in timeline.spans}
    ends_in_time: dict[int, Seconds] = {}
    missing = []
    for order, events in zip(schedule.orders, graph.events, strict=True):
        for action, event in zip(order, events, strict=True):
            if action.op in TIMED_OPS:
                if action in found:
                    ends_in_time[event] = found[action]
                else:
                    missing.append(str(action))
    if missing:
        raise ScheduleError([f"the timeline is another schedule's: it lacks {', '.join(missing[:5])}"])
    reached: list[Seconds] = [0]
    for event in range(1, len(graph)):
        before = max(reached[graph.first[event]], reached[graph.second[event]])
        reached.append(max(before, ends_in_time.get(event, before)))
    rank = [-1] * len(graph)
    for place, event in enumerate(sorted(ends_in_time, key=lambda event: (reached[event], event))):
        rank[event] = place
    return rank


def _windows(schedule: Schedule, graph: Graph, lookahead: int) -> dict[int, int]:
    """Event of a compute or fill -> the one at whose end its messages may come; the start: at once."""
    windows = {}
    for order, events in zip(schedule.orders, graph.events, strict=True):
        own = [event for action, event in zip(order, events, strict=True) if action.op in TIMED_OPS]
        for i, event in enumerate(own):
            windows[event] = own[i - 1 - lookahead] if i > lookahead else START
    return windows


def _transfers(schedule: Schedule, events: _Events) -> Iterator[_Transfer]:
    """Everything that crosses workers: edge by edge, micro-batch by micro-batch, then what encoders send."""
    stages = schedule.placement.stages
    for of_edge in feeds(schedule):
        crossing = [feed for feed in of_edge if stages[feed.source].worker != stages[feed.destination].worker]
        for microbatch, size in enumerate(crossing[0].microbatches if crossing else ()):
            for feed in crossing:
                yield _Transfer(
                    Message(
                        source=feed.source,
                        destination=feed.destination,
                        microbatch=microbatch,
                        samples=feed.samples[size],
                        tensors=feed.tensors,
                        is_gradient=feed.is_gradient,
                    ),
                    (events.computes[feed.source, feed.op][microbatch],),
                    (events.computes[feed.destination, feed.op][microbatch],),
                )
    encoded: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    for flow in frozen_flows(schedule):
        if stages[flow.source].worker != stages[flow.destination].worker:
            encoded[flow.source, stages[flow.destination].worker].append(flow)
    for group in encoded.values():
        for together in _overlapping(group):
            yield _encoded(together, events)


def _encoded(group: Sequence[Flow], events: _Events) -> _Transfer:
    """One message for all of these flows, which come from one encoder stage and go to one worker."""
    message = Message(
        source=group[0].source,
        destination=min(flow.destination for flow in group),
        microbatch=group[0].microbatch,
        samples=Range(min(flow.samples.start for flow in group), max(flow.samples.stop for flow in group)),
        tensors=tuple(dict.fromkeys(name for flow in group for name in flow.tensors)),
    )
    consumers = [
        events.computes[flow.destination, flow.consumer.op][flow.consumer.microbatch]
        for flow in group
        if not flow.is_ahead
    ]
    producers = dict.fromkeys(events.fills[action.slot] for flow in group for action in flow.producers)
    return _Transfer(message, tuple(producers), consumers)


def _overlapping(group: Sequence[Flow]) -> list[list[Flow]]:
    """The flows in sets that share rows; rows that only touch, as those of two micro-batches, stay apart."""
    found: list[list[Flow]] = []
    stop = -1
    for flow in sorted(group, key=lambda flow: (flow.samples.start, flow.samples.stop)):
        if flow.samples.start >= stop:
            found.append([])
        found[-1].append(flow)
        stop = max(stop, flow.samples.stop)
    return found


def _compute_entries(
    schedule: Schedule, graph: Graph, rank: Sequence[int]
) -> list[list[tuple[tuple[int, int, int], Action]]]:
    """For each worker its actions with their keys; ops of a whole stage stay behind the compute that they follow."""
    entries = []
    for order, events in zip(schedule.orders, graph.events, strict=True):
        key, keyed = -1, []
        for i, (action, event) in enumerate(zip(order, events, strict=True)):
            if action.op in TIMED_OPS:
                key = rank[event]
            keyed.append(((key, 0, i), action))
        entries.append(keyed)
    return entries

"""The total order of computes and messages that `communicate` follows, apart from the times that decide it.

    computes   by their ends, however equal ones stand: an event never stands before one that it waits for
    messages   each right behind the later of two computes: the one that produces it, and the one at whose end the
               worker that reads it has room for it

Which two these are depends on no time. So they are found once [1], and many timelines of one schedule are put in order
quickly, as a search over cuts does [2].

>>> from diffusionpipe.schedules import forward_only
>>> from diffusionpipe.timing import graph_of
>>> schedule = forward_only(2, 2)
>>> order = message_order(schedule, graph_of(schedule))
>>> order.bounds                        # of the two activations: behind 1 and the start, behind 2 and the start
((1, 0), (2, 0))
>>> rank = order.ranks([0, 2, 4, 2, 4, 5, 7])   # by event, see `timing.graph`
>>> [rank[event] for event in order.computes], order.placed(rank)
([0, 1, 2, 3], [(0, 0), (1, 1)])
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diffusionpipe.ir import Message, Op, Range, Schedule
from diffusionpipe.ir.flows import TIMED_OPS, Flow, feeds, frozen_flows
from diffusionpipe.timing import START, Graph
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOrder:
    """What puts the messages of a compute-only schedule in order, but for the times."""

    computes: tuple[int, ...]
    """The events of computes and fills."""
    messages: tuple[Message, ...]
    """Everything that crosses workers: edge by edge, micro-batch by micro-batch, then what encoders send."""
    bounds: tuple[tuple[int, int], ...]
    """By message the events that it stands behind: the last that produces it, and the one at whose end its reader has
    room; the start: at once."""
    readers: tuple[int, ...]
    """By message the first event that reads it; the start: none in this iteration."""
    num_events: int

    def ranks(self, ends: Sequence[Seconds]) -> list[int]:
        """By event its place among all computes and fills; -1 for the start, and for all that has no place."""
        rank = [-1] * self.num_events
        for place, event in enumerate(sorted(self.computes, key=ends.__getitem__)):  # stable: by event at equal ends
            rank[event] = place
        return rank

    def placed(self, rank: Sequence[int]) -> list[tuple[int, int]]:
        """(place that it stands behind, message) of each message, in order; at equal places that of the messages."""
        return sorted(
            (max(rank[producer], rank[window]), index)
            for index, (producer, window) in enumerate(self.bounds)  # [2]
        )


def message_order(schedule: Schedule, graph: Graph, *, lookahead: int = 1) -> MessageOrder:
    """The order of a compute-only schedule's messages; `graph` is its graph, `lookahead` that of `communicate`."""
    windows = _windows(schedule, graph, lookahead)
    transfers = list(_transfers(schedule, _Events(schedule, graph)))
    return MessageOrder(
        computes=tuple(sorted(windows)),
        messages=tuple(transfer.message for transfer in transfers),
        bounds=tuple(  # [1] events of one worker stand in its order, so the last and the first of them are known
            (max(transfer.producers), windows[min(transfer.consumers)] if transfer.consumers else START)
            for transfer in transfers
        ),
        readers=tuple(min(transfer.consumers, default=START) for transfer in transfers),
        num_events=len(graph),
    )


def _windows(schedule: Schedule, graph: Graph, lookahead: int) -> dict[int, int]:
    """Event of a compute or fill -> the one at whose end its messages may come; the start: at once."""
    windows = {}
    for order, events in zip(schedule.orders, graph.events, strict=True):
        own = [event for action, event in zip(order, events, strict=True) if action.op in TIMED_OPS]
        for i, event in enumerate(own):
            windows[event] = own[i - 1 - lookahead] if i > lookahead else START
    return windows


@dataclass(frozen=True, slots=True)
class _Transfer:
    message: Message
    producers: Sequence[int]
    """Events."""
    consumers: Sequence[int]
    """The events of its readers in this iteration; none where the next one reads it."""


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

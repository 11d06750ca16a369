"""The total order of computes and messages that `communicate` follows, apart from the times that decide it.

    computes   by their ends, equal ones in any order: an event never comes before one that it waits for
    messages   each right after the later of two computes: the one that produces it, and the one at whose end the
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from diffusionpipe.ir import COMPUTE_OPS, Action, Message, Op, Range, Schedule
from diffusionpipe.ir.flows import TIMED_OPS, Feed, Flow, feeds, frozen_flows
from diffusionpipe.timing import START, Graph
from diffusionpipe.units import Seconds

NO_ROOMS: Mapping[tuple[int, int], Action] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOrder:
    """The rules that put the messages of a compute-only schedule in order, without the times that decide it."""

    computes: tuple[int, ...]
    """The events, in the schedule's graph, of all computes and fills."""
    contents: tuple[tuple[Feed, int] | Message, ...]
    """Everything that crosses workers: edge by edge, micro-batch by micro-batch, then what encoders send. An
    entry (feed, micro-batch) is for one message of the feed, which `message` makes."""
    transfers: tuple[tuple[int, ...], ...]
    """The events in the graph that a message represents, by message: the transfer of the feed, or the transfers of all
    frozen outputs of this batch that one encoder's message brings."""
    bounds: tuple[tuple[int, int], ...]
    """The two events after which a message comes, by message: the last that produces it, and the one at whose end its
    reader has room; the start: at once."""
    num_events: int
    """The number of all events of the graph."""

    def ranks(self, ends: Sequence[Seconds]) -> list[int]:
        """The place of each event among all computes and fills by their ends, by event; -1 for events of other kinds.

        `ends`: the end of each event.
        """
        rank = [-1] * self.num_events
        for place, event in enumerate(sorted(self.computes, key=ends.__getitem__)):  # stable: by event at equal ends
            rank[event] = place
        return rank

    def placed(self, rank: Sequence[int]) -> list[tuple[int, int]]:
        """(place of the event after which it comes, index in `contents`) of each message, in the order of the sends.

        `rank` is the result of `ranks`. At equal places the index decides.
        """
        behind = [rank[producer] if rank[producer] > rank[window] else rank[window] for producer, window in self.bounds]
        return sorted(zip(behind, range(len(behind)), strict=True))  # [2]

    def message(self, index: int) -> Message:
        """The message with this index in `contents`."""
        content = self.contents[index]
        if isinstance(content, Message):
            return content
        feed, microbatch = content
        return Message(
            source=feed.source,
            destination=feed.destination,
            microbatch=microbatch,
            samples=feed.samples[feed.microbatches[microbatch]],
            tensors=feed.tensors,
            is_gradient=feed.is_gradient,
        )


def message_order(
    schedule: Schedule,
    graph: Graph,
    *,
    lookahead: int = 1,
    rooms: Mapping[tuple[int, int], Action] = NO_ROOMS,
) -> MessageOrder:
    """The rules for the order of a compute-only schedule's messages, to be used with any times.

    `graph` is its graph; `communicate` explains the other arguments.
    """
    stages, windows, events = schedule.placement.stages, _windows(schedule, graph, lookahead), _Events(schedule, graph)
    contents: list[tuple[Feed, int] | Message] = []
    transfers, bounds, known = list[tuple[int, ...]](), list[tuple[int, int]](), 0
    for of_edge in feeds(schedule):
        crossing = [feed for feed in of_edge if stages[feed.source].worker != stages[feed.destination].worker]
        ends = [(events.computes[f.source, f.op], events.computes[f.destination, f.op]) for f in crossing]
        # Gradients flow for the same micro-batches as activations.
        numbers = crossing[0].numbers if crossing else range(0)
        for place, microbatch in enumerate(numbers):
            for number, (feed, (producers, consumers)) in enumerate(zip(crossing, ends, strict=True)):
                contents.append((feed, microbatch))
                # `graph.transfers` lists feed by feed, and this loop goes micro-batch by micro-batch.
                transfers.append((graph.transfers[known + number * len(numbers) + place],))
                bounds.append((producers[microbatch], windows[consumers[microbatch]]))
        known += len(crossing) * len(numbers)
    for message, sources, readers, brought in _encoded(schedule, graph, events):
        # [1] Events of one worker stand in its order, so the last and the first of them are known.
        room = rooms.get((message.source, stages[message.destination].worker))
        if room is not None:
            bounds.append((max(sources), events.computes[room.stage, room.op][room.microbatch]))
        else:
            bounds.append((max(sources), windows[min(readers)] if readers else START))
        contents.append(message)
        transfers.append(brought)
    return MessageOrder(
        computes=tuple(sorted(windows)),
        contents=tuple(contents),
        transfers=tuple(transfers),
        bounds=tuple(bounds),
        num_events=len(graph),
    )


def _windows(schedule: Schedule, graph: Graph, lookahead: int) -> dict[int, int]:
    """Event of a compute or fill -> the event at whose end the messages that it reads may come; the start: at once.

    Fills do not count for `lookahead`: they read no messages, and a short one before a compute would leave its messages
    no time.
    """
    windows = {}
    for order, events in zip(schedule.orders, graph.events, strict=True):
        own: list[int] = []  # computes so far
        for action, event in zip(order, events, strict=True):
            if action.op in COMPUTE_OPS:
                # With a lookahead of 1 the message may come when the last compute but one has ended: it travels during
                # the last one.
                windows[event] = own[-1 - lookahead] if len(own) > lookahead else START
                own.append(event)
            elif action.op in TIMED_OPS:
                windows[event] = START
    return windows


class _Events:
    """The events of a schedule's computes, by (stage, op) and micro-batch, and of its fills, by slot."""

    def __init__(self, schedule: Schedule, graph: Graph) -> None:
        self.computes: dict[tuple[int, Op], dict[int | None, int]] = defaultdict(dict)
        self.fills: dict[int | None, int] = {}
        for order, events in zip(schedule.orders, graph.events, strict=True):
            for action, event in zip(order, events, strict=True):
                if action.op is Op.ENCODE:
                    self.fills[action.slot] = event
                elif action.op in TIMED_OPS:
                    self.computes[action.stage, action.op][action.microbatch] = event


_Encoded = tuple[Message, Sequence[int], Sequence[int], tuple[int, ...]]
"""A message of an encoder, the events that produce it, the events that read it, and the events of its transfers in the
graph; no readers and no transfers where the next iteration reads it."""
_Brought = tuple[Flow, int]
"""Frozen outputs between workers, and the event of their transfer; the start where the next iteration reads them."""


def _encoded(schedule: Schedule, graph: Graph, events: _Events) -> Iterator[_Encoded]:
    """Each message that an encoder stage sends to another worker, with its events (`_Encoded`)."""
    stages, transfers = schedule.placement.stages, iter(graph.encoded)
    encoded: dict[tuple[int, int], list[_Brought]] = defaultdict(list)
    for flow in frozen_flows(schedule):
        if stages[flow.source].worker != stages[flow.destination].worker:
            event = START if flow.is_ahead else next(transfers)
            encoded[flow.source, stages[flow.destination].worker].append((flow, event))
    for group in encoded.values():
        for together in _overlapping(group):
            yield _together(together, events)


def _together(brought: Sequence[_Brought], events: _Events) -> _Encoded:
    """One message for all of these flows, which go from one encoder stage to one worker, with its events."""
    group = [flow for flow, _ in brought]
    message = Message(
        source=group[0].source,
        # Any stage of the worker would do: rows of frozen outputs belong to the worker. The lowest one is always the
        # same.
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
    return message, tuple(producers), consumers, tuple(event for _, event in brought if event != START)


def _overlapping(group: Sequence[_Brought]) -> list[list[_Brought]]:
    """The flows in sets whose samples overlap; samples that only touch, as of two micro-batches, are in two sets."""
    found: list[list[_Brought]] = []
    stop = -1  # below all starts: the first flow begins a set
    for flow, event in sorted(group, key=lambda one: (one[0].samples.start, one[0].samples.stop)):
        if flow.samples.start >= stop:
            found.append([])
        found[-1].append((flow, event))
        stop = max(stop, flow.samples.stop)
    return found

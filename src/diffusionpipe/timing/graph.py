"""A schedule as a graph of events: made once, timed often.

An event is an action, a transfer (the SEND and the RECV of a message are one), or a place where others meet. It starts
at the end of the later of the two events that it waits for, and takes its price. Event 0 is the start of the iteration.

    worker 0   0F0 0F1        event   1 0F0   2 0F1   3 transfer   4 transfer   5 1F0   6 1F1
    worker 1       1F0 1F1    first   0       1       1            2            0       5     [1] before it on its host
                              second  0       0       0            0            3       4     [2] its input

An event that waits for more than two others gets events without work before it, each of which is the later of two [3].
So timing a graph is one loop without branches (`timing.clock`), and the number of an event is larger than of those that
it waits for. Whether events can be numbered like this depends on no time; if not, the schedule is stuck (a deadlock).

>>> from diffusionpipe.schedules import forward_only
>>> graph = graph_of(forward_only(2, 2))
>>> graph.first[1:], graph.second[1:]
((0, 1, 1, 2, 0, 5), (0, 0, 0, 0, 3, 4))
>>> graph.events                # of the actions of each worker
((1, 2), (5, 6))
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import COMPUTE_OPS, MESSAGE_OPS, Action, Op, Range, Schedule
from diffusionpipe.ir.flows import TIMED_OPS, feeds, frozen_flows, slots_of_edge, slots_of_encoder
from diffusionpipe.ir.schedule import lone_blocks
from diffusionpipe.timing.machine import HOST, Machine, Streams, machine_of
from diffusionpipe.timing.work import NOTHING, Compute, Encode, Gather, Reduce, Room, Transfer, Work

START = 0
"""The number of the event at which the iteration starts."""

# Their spans are the transfer's own: on a machine whose host waits for them, they do not wake up slower after a wait.
_TRANSFERS = MESSAGE_OPS | {Op.REDUCE_GRAD, Op.UNSHARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The events of a schedule in an order in which they can happen, each with its work and the two it waits for.

    All tuples but the last five have one entry for each event.
    """

    first: tuple[int, ...]
    """The first event that each event waits for, by event; for work on a host the event before it there."""
    second: tuple[int, ...]
    """The second event that each event waits for, by event."""
    work: tuple[int, ...]
    """The index of each event's work in `works`, by event."""
    is_on_host: tuple[bool, ...]
    """Whether each event is a worker's own work, by event; such work takes longer after a wait, transfers do not."""
    works: tuple[Work, ...]
    """Every different work once."""
    events: tuple[tuple[int, ...], ...]
    """For each worker, the event of each of its actions, in their order."""
    tails: tuple[int, ...]
    """The last event on each worker's host, by worker."""
    transfers: tuple[int, ...] = ()
    """The events that bring the feeds between workers in a schedule without explicit messages, feed by feed,
    micro-batch by micro-batch."""
    encoded: tuple[int, ...] = ()
    """The events that bring frozen outputs of this batch between workers, in the order of `frozen_flows`."""

    def __len__(self) -> int:
        return len(self.first)


def graph_of(schedule: Schedule, machine: Machine | None = None, *, has_rooms: bool = False) -> Graph:
    """The graph of the schedule's events on a machine; None: one queue for transfers in each direction.

    With `has_rooms`, an empty event comes before each action that occupies a worker, and after the last one, where work
    may be put later. Cost: one visit for each action, message and flow.

    Raises:
        ScheduleError: the schedule gets stuck, or a message does not have one SEND and one RECV; the places where
            workers wait are named.
    """
    builder = _Builder(schedule, machine or machine_of(Streams.DIRECTION))
    for worker in range(schedule.num_workers):
        builder.add_order(worker, has_rooms=has_rooms)
    builder.add_feeds()
    builder.add_frozen_flows()
    return builder.numbered()


class _Builder:
    """Makes the graph of a schedule: events in the order in which they are found, each with all that it waits for."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.schedule, self.machine = schedule, machine
        self.waits: list[list[int]] = [[]]  # event 0 is the start and waits for nothing
        self.work: list[int] = [0]
        self.is_on_host: set[int] = set()
        self.weights = [stage.weights for stage in schedule.placement.stages]
        self.works: dict[Work, int] = {NOTHING: 0}
        self.events: list[list[int]] = []
        self.tails: list[int] = []
        self.computes: dict[tuple[int, Op], tuple[int, dict[int | None, int]]] = {}
        """(stage, op) -> index of its work, and micro-batch -> event."""
        self.fills: dict[int, int] = {}
        self.transfers: list[int] = []
        self.encoded: list[int] = []
        self.message_of_slot: dict[int, int] = {}
        self.reduction_of_block: dict[tuple[int, int], int] = {}
        """(block, number of reductions of it before) -> the event in which the holders of the block reduce it."""
        self.reduced: dict[int, tuple[int, ...]] = defaultdict(tuple)
        self.num_ends: dict[int, int] = defaultdict(int)
        self.lone = lone_blocks(schedule)

    def add(self, work: int, waits: list[int]) -> int:
        """Add an event that does the work with this index and waits for the events `waits`; returns its number."""
        self.waits.append(waits)
        self.work.append(work)
        return len(self.waits) - 1

    def index_of(self, work: Work) -> int:
        """The index of a work in the list of different works, to which a new one is added."""
        return self.works.setdefault(work, len(self.works))

    def add_order(self, worker: int, *, has_rooms: bool) -> None:
        """Add the events of a worker's actions, each after the event before it on its host or its queue.

        `has_rooms`: whether a room comes before each action that occupies the worker, and after the last one.
        """
        host, events, is_on_host = START, list[int](), self.is_on_host
        ends: dict[Hashable, tuple[int, int]] = {}  # queue -> its last event, and the event after which it was issued
        gathered: dict[int, int] = {}  # block -> the gather whose reader comes
        turns = Counter[int]()  # block -> its reductions so far
        for position, action in enumerate(self.schedule.orders[worker]):
            # Only the worker's own work can be put off for other work, so transfers have no room before them.
            if has_rooms and action.op in TIMED_OPS:
                host = self.add(self.index_of(Room(worker, position)), [host])
            if action.op in COMPUTE_OPS:
                waits = [host]  # [1]
                # This list is the event's own: the gather below and `add_feeds` later append to it.
                event = host = self._compute(action, waits)
                is_on_host.add(event)
                # Only the first compute after a gather waits for it: the others come after this one on the same host.
                if gathered and (gather := gathered.pop(self.weights[action.stage], None)) is not None:
                    waits.append(gather)
                events.append(event)
                continue
            event = self._event(action, turns)
            queue = self.machine(self.schedule, worker, action)
            if queue == HOST:
                # In front: `Graph.first` of work on a host is the event before it there. A message's other end may have
                # put waits in already.
                self.waits[event].insert(0, host)
                if action.op not in _TRANSFERS:
                    is_on_host.add(event)
                host = event
            else:
                last, issued_behind = ends.get(queue, (START, -1))  # -1 differs from every host's event, START included
                if issued_behind != host:  # else what was issued before it has waited for the host
                    self.waits[event].append(host)
                self.waits[event].append(last)
                ends[queue] = event, host
            if action.op is Op.UNSHARD:
                gathered[self.weights[action.stage]] = event
            events.append(event)
        if has_rooms:
            host = self.add(self.index_of(Room(worker, len(events))), [host])
        self.events.append(events)
        self.tails.append(host)

    def _compute(self, action: Action, waits: list[int]) -> int:
        found = self.computes.get((action.stage, action.op))
        if found is None:
            work = self.index_of(Compute(action.stage, action.op))
            found = self.computes[action.stage, action.op] = work, {}
        event = found[1][action.microbatch] = self.add(found[0], waits)
        return event

    def _event(self, action: Action, turns: Counter[int]) -> int:
        """The number of the event of an action, which is added unless another worker's action has added it already.

        The two ends of a message are one event, and so are the ends of a block's reduction. `turns`: how often the
        action's worker has reduced each block before.
        """
        op, slot = action.op, action.slot
        if op in MESSAGE_OPS:
            assert slot is not None
            self.num_ends[slot] += 1
            if slot not in self.message_of_slot:
                message = self.schedule.messages[slot]
                work = self._transfer(message.source, message.destination, message.tensors, message.samples)
                self.message_of_slot[slot] = self.add(work, [])
            return self.message_of_slot[slot]
        if op is Op.ENCODE:
            assert slot is not None
            self.fills[slot] = self.add(self.index_of(Encode(slot)), [])
            return self.fills[slot]
        if op is Op.REDUCE_GRAD:
            return self._reduction(action.stage, turns)
        return self.add(self.index_of(Gather(action.stage) if op is Op.UNSHARD else NOTHING), [])

    def _transfer(self, source: int, destination: int, tensors: tuple[str, ...], samples: Range) -> int:
        """The index of the work of a transfer between the workers of two stages."""
        stages = self.schedule.placement.stages
        return self.index_of(Transfer(stages[source].worker, stages[destination].worker, tensors, len(samples)))

    def _reduction(self, stage: int, turns: Counter[int]) -> int:
        block = self.weights[stage]
        if block in self.lone:  # its copies are in other data-parallel groups: it may be reduced several times
            return self.add(self.index_of(Reduce((stage,))), [])
        key = block, turns[block]
        turns[block] += 1
        event = self.reduction_of_block.get(key)
        if event is None:
            # Its work, 0 for now, lists all stages that meet; `numbered` sets it when all orders are read.
            event = self.reduction_of_block[key] = self.add(0, [])
        self.reduced[event] += (stage,)
        return event

    def add_feeds(self) -> None:
        """Let each compute wait for the computes whose outputs or gradients it reads, or for their transfers [2].

        Transfers between workers are added where the schedule has no explicit messages.
        """
        stages, is_explicit = self.schedule.placement.stages, bool(self.message_of_slot)
        slots = slots_of_edge(self.schedule) if is_explicit else {}
        for feed in (feed for of_edge in feeds(self.schedule) for feed in of_edge):
            _, producers = self.computes[feed.source, feed.op]
            _, consumers = self.computes[feed.destination, feed.op]
            is_local = stages[feed.source].worker == stages[feed.destination].worker
            works = {
                size: 0 if is_local else self._transfer(feed.source, feed.destination, feed.tensors, samples)
                for size, samples in feed.samples.items()
            }
            for microbatch, size in feed.sizes():
                waits = self.waits[consumers[microbatch]]
                if is_local:
                    waits.append(producers[microbatch])
                elif is_explicit:
                    candidates = slots.get((feed.source, feed.destination, microbatch, feed.is_gradient), ())
                    waits.extend(self._messages(candidates, feed.samples[size]))
                else:
                    self.transfers.append(self.add(works[size], [producers[microbatch]]))
                    waits.append(self.transfers[-1])

    def add_frozen_flows(self) -> None:
        """Let each compute wait for the fills whose outputs it reads, or for their transfers.

        No event of this iteration waits for outputs of the next batch. Transfers between workers are added where the
        schedule has no explicit messages.
        """
        stages, is_explicit = self.schedule.placement.stages, bool(self.message_of_slot)
        slots = slots_of_encoder(self.schedule) if is_explicit else {}
        for flow in frozen_flows(self.schedule):
            if flow.is_ahead:
                continue
            source, destination = stages[flow.source].worker, stages[flow.destination].worker
            _, consumers = self.computes[flow.destination, flow.consumer.op]
            waits = self.waits[consumers[flow.consumer.microbatch]]
            if source != destination and is_explicit:
                waits.extend(self._messages(slots.get((flow.source, destination), ()), flow.samples))
                continue
            producers = [self.fills[action.slot] for action in flow.producers if action.slot is not None]
            if source != destination:
                work = self._transfer(flow.source, flow.destination, flow.tensors, flow.samples)
                producers = [self.add(work, producers)]
                self.encoded += producers
            waits.extend(producers)

    def _messages(self, slots: Sequence[int], samples: Range) -> Iterator[int]:
        """The events of those messages among `slots` that bring any of these samples."""
        messages = self.schedule.messages
        for slot in slots:
            if messages[slot].samples.overlaps(samples):
                yield self.message_of_slot[slot]

    def numbered(self) -> Graph:
        """The graph of all events, numbered in an order in which they can happen, each after at most two others."""
        for event, stages in self.reduced.items():
            self.work[event] = self.index_of(Reduce(stages))
        number = [0] * len(self.waits)
        first, second, work, is_on_host = [START], [START], [0], [False]
        for event in self._order()[1:]:
            waits = self.waits[event]
            if len(waits) == 1:
                one, other = number[waits[0]], START
            elif len(waits) == 2:
                one, other = number[waits[0]], number[waits[1]]
            else:
                # Without doubles, the host's event still first.
                one, *rest = dict.fromkeys(number[other] for other in waits)
                while len(rest) > 1:  # [3]
                    first.append(rest.pop())
                    second.append(rest.pop())
                    work.append(0)
                    is_on_host.append(False)
                    rest.append(len(first) - 1)
                other = rest[0] if rest else START  # all waits may be one and the same event
            number[event] = len(first)
            first.append(one)
            second.append(other)
            work.append(self.work[event])
            is_on_host.append(event in self.is_on_host)
        return Graph(
            first=tuple(first),
            second=tuple(second),
            work=tuple(work),
            is_on_host=tuple(is_on_host),
            works=tuple(self.works),
            events=tuple(tuple(number[event] for event in events) for events in self.events),
            tails=tuple(number[tail] for tail in self.tails),
            transfers=tuple(number[transfer] for transfer in self.transfers),
            encoded=tuple(number[transfer] for transfer in self.encoded),
        )

    def _order(self) -> list[int]:
        """All events in an order in which they can happen.

        Raises:
            ScheduleError: there is no such order.
        """
        for slot, count in self.num_ends.items():
            if count != 2:
                event = self.message_of_slot[slot]
                self.waits[event].append(event)  # it waits for an end that never comes
        readers: list[list[int]] = [[] for _ in self.waits]
        # Kahn's algorithm: an event is in the order as soon as all that it waits for are.
        counts = [len(waits) for waits in self.waits]
        for event, waits in enumerate(self.waits):
            for other in waits:
                readers[other].append(event)
        order = [START]
        for event in order:  # grows while it is read
            for reader in readers[event]:
                counts[reader] -= 1
                if not counts[reader]:
                    order.append(reader)
        if len(order) < len(self.waits):
            raise ScheduleError([f"deadlock: {line}" for line in self._blocked(counts)])
        return order

    def _blocked(self, counts: Sequence[int]) -> Iterator[str]:
        """One sentence for each host and queue that stops; `counts`: by event, for how many others it still waits."""
        # By worker and queue its events, each with the one after which it was issued and its action.
        queues: dict[tuple[int, Hashable], list[tuple[int, int, Action]]] = defaultdict(list)
        for worker, (order, own) in enumerate(zip(self.schedule.orders, self.events, strict=True)):
            host = START
            for action, event in zip(order, own, strict=True):
                queue = HOST if action.op in COMPUTE_OPS else self.machine(self.schedule, worker, action)
                queues[worker, queue].append((event, host, action))
                host = event if queue == HOST else host
        for (worker, queue), events in sorted(queues.items(), key=lambda item: (item[0][1] != HOST, str(item[0]))):
            for event, issued_behind, action in events:
                if counts[event]:
                    if queue == HOST:
                        yield f"worker {worker} waits at {action} for its inputs"
                    elif not counts[issued_behind]:
                        # Only the head of a queue that its host has come to: all others wait for one that is named
                        # already.
                        yield f"worker {worker} has {action} at the head of its stream {queue}"
                    break

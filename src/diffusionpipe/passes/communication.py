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

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Message, Op, Range, Schedule, Timeline
from diffusionpipe.ir.flows import TIMED_OPS, Flow, ends, flows
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
    stages = schedule.placement.stages
    all_flows = flows(schedule)
    transfers = list(_transfers(schedule, all_flows))
    rank = _ranks(schedule, timeline, _inputs(schedule, all_flows, transfers))
    windows = _windows(schedule, lookahead)

    def key(transfer: _Transfer) -> int:
        produced = max(rank[producer] for producer in transfer.producers)
        if not transfer.consumers:  # read in the next iteration: it may come as soon as it is there
            return produced
        window = windows[min(transfer.consumers, key=rank.__getitem__)]
        return max(produced, -1 if window is None else rank[window])

    transfers.sort(key=key)  # stable: equal keys keep the order of the edges
    entries = _compute_entries(schedule, rank)
    for slot, transfer in enumerate(transfers):
        for action in ends(transfer.message, slot):
            entries[stages[action.stage].worker].append(((key(transfer), 1, slot), action))
    orders = tuple(tuple(action for _, action in sorted(e, key=lambda entry: entry[0])) for e in entries)
    _assert_placed(orders, transfers)
    return replace(schedule, messages=tuple(transfer.message for transfer in transfers), orders=orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    message: Message
    producers: tuple[Action, ...]
    consumers: tuple[Action, ...]
    """Its readers in this iteration."""


def _inputs(
    schedule: Schedule, all_flows: Sequence[Flow], transfers: Sequence[_Transfer]
) -> dict[Action, list[Action]]:
    """Action -> the actions whose ends it waits for, here or behind a message."""
    stages = schedule.placement.stages
    inputs: dict[Action, list[Action]] = defaultdict(list)
    for flow in all_flows:
        if stages[flow.source].worker == stages[flow.destination].worker and not flow.is_ahead:
            inputs[flow.consumer].extend(flow.producers)
    for transfer in transfers:
        for consumer in transfer.consumers:
            inputs[consumer].extend(transfer.producers)
    return inputs


def _ranks(schedule: Schedule, timeline: Timeline, inputs: Mapping[Action, Sequence[Action]]) -> Mapping[Action, int]:
    """Compute action -> its place among all, by end; an action never stands before one that it waits for."""
    ends_in_time: dict[Action, Seconds] = {span.action: span.end for span in timeline.spans}
    keys: dict[Action, tuple[Seconds, int]] = {}
    orders = [deque(action for action in order if action.op in TIMED_OPS) for order in schedule.orders]
    missing = [str(action) for order in orders for action in order if action not in ends_in_time]
    if missing:
        raise ScheduleError([f"the timeline is another schedule's: it lacks {', '.join(missing[:5])}"])
    host: list[Seconds] = [0] * len(orders)
    has_moved = True
    while has_moved:
        has_moved = False
        for worker, order in enumerate(orders):
            while order and all(producer in keys for producer in inputs.get(order[0], ())):
                action = order.popleft()
                before = [keys[producer][0] for producer in inputs.get(action, ())]
                host[worker] = max(ends_in_time[action], host[worker], *before)
                keys[action] = (host[worker], len(keys))
                has_moved = True
    stuck = [f"deadlock: worker {worker} waits at {order[0]}" for worker, order in enumerate(orders) if order]
    if stuck:
        raise ScheduleError(stuck)
    return {action: rank for rank, action in enumerate(sorted(keys, key=lambda action: keys[action]))}


def _windows(schedule: Schedule, lookahead: int) -> dict[Action, Action | None]:
    """Compute action -> the action at whose end its messages may come; None: from the start."""
    windows = {}
    for order in schedule.orders:
        computes = [action for action in order if action.op in TIMED_OPS]
        for i, action in enumerate(computes):
            windows[action] = computes[i - 1 - lookahead] if i > lookahead else None
    return windows


def _transfers(schedule: Schedule, all_flows: Sequence[Flow]) -> Iterator[_Transfer]:
    stages = schedule.placement.stages
    crossing = [flow for flow in all_flows if stages[flow.source].worker != stages[flow.destination].worker]
    if any(flow.consumer.op is Op.T or flow.producers[0].op is Op.T for flow in crossing):
        raise ScheduleError(["messages of forwards without gradient (T) between workers have no text form"])
    encoded: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    for flow in crossing:
        if flow.is_frozen:
            encoded[flow.source, stages[flow.destination].worker].append(flow)
        else:
            yield _transfer([flow], is_gradient=flow.is_gradient)
    for group in encoded.values():
        for together in _overlapping(group):
            yield _transfer(together, is_gradient=False)


def _transfer(group: Sequence[Flow], *, is_gradient: bool) -> _Transfer:
    """One message for all of these flows, which come from one stage and go to one worker."""
    message = Message(
        source=group[0].source,
        destination=min(flow.destination for flow in group),
        microbatch=group[0].microbatch,
        samples=Range(min(flow.samples.start for flow in group), max(flow.samples.stop for flow in group)),
        tensors=tuple(dict.fromkeys(name for flow in group for name in flow.tensors)),
        is_gradient=is_gradient,
    )
    return _Transfer(
        message=message,
        producers=tuple(dict.fromkeys(producer for flow in group for producer in flow.producers)),
        consumers=tuple(flow.consumer for flow in group if not flow.is_ahead),
    )


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


def _compute_entries(schedule: Schedule, rank: Mapping[Action, int]) -> list[list[tuple[tuple[int, int, int], Action]]]:
    """For each worker its actions with their keys; ops of a whole stage stay behind the compute that they follow."""
    entries = []
    for order in schedule.orders:
        key, keyed = -1, []
        for i, action in enumerate(order):
            key = rank.get(action, key)
            keyed.append(((key, 0, i), action))
        entries.append(keyed)
    return entries


def _assert_placed(orders: Sequence[Sequence[Action]], transfers: Sequence[_Transfer]) -> None:
    """Every send stands behind its producers and every receive before its consumers."""
    position = {action: i for order in orders for i, action in enumerate(order)}
    for slot, transfer in enumerate(transfers):
        send, recv = ends(transfer.message, slot)
        assert all(position[producer] < position[send] for producer in transfer.producers), send
        assert all(position[recv] < position[consumer] for consumer in transfer.consumers), recv

"""Sends and receives, in an order that cannot deadlock.

One total order of everything decides. Compute actions are sorted by their simulated end. A message comes right after
the later of two of them: the action that produces it, and the action at whose end the worker that reads it has room for
it. Every worker sorts its computes, sends and receives by that one order. 1F1B with p = m = 2, whose messages 0 and 1
are activations, 2 and 3 gradients:

    total order   0F0  [0]  0F1  1F0  [1]  1B0  [2]  1F1  0B0  1B1  [3]  0B1
    worker 0      0F0   s0  0F1        s1        r2       0B0        r3  0B1
    worker 1            r0       1F0   r1  1B0   s2  1F1       1B1   s3

A reduction of gradients that several workers hold comes at all of them after the last of their backwards in the total
order, before the messages of that place. So a worker never begins one while another waits for its messages.

Why nothing can deadlock, even with unbuffered sends, one stream for many messages, or a host that waits for each of
them: let the least element of the order that has not happened be x. Everything before it on its worker, on all its
workers if it is a message or a reduction, is less than x, so it has happened. A compute's inputs are messages that are
received before it, so they are less than x. A message's streams hold before it only messages that are less than x.
So x can happen. Ties are broken by one numbering that respects all dependencies, so durations of zero do no harm, and
neither does a timeline with clock errors.

Transfers that take no time change the start of no action: by the same induction a message is over when the action
before it ends, and in the timeline its reader starts no earlier than that.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Op, Schedule, Timeline
from diffusionpipe.ir.flows import TIMED_OPS, ends
from diffusionpipe.passes.message_order import NO_ROOMS, message_order
from diffusionpipe.timing import Graph, graph_of
from diffusionpipe.units import Seconds


def communicate(
    schedule: Schedule,
    timeline: Timeline,
    *,
    lookahead: int = 1,
    rooms: Mapping[tuple[int, int], Action] = NO_ROOMS,
    graph: Graph | None = None,
) -> Schedule:
    """The schedule with explicit sends, receives and messages, in an order by its timeline that cannot deadlock.

    A message is posted at the earliest when its reader is `lookahead + 1` compute actions ahead on its worker: with 1
    it travels while the action before its reader runs, with 0 the worker waits for it. This bounds the receive buffers.
    An activation or gradient is one message for each edge and micro-batch. Frozen outputs are one message for each
    encoder stage, reading worker and micro-batch, with all tensors that the worker's stages read. `rooms` says for an
    encoder stage and a reading worker after which compute action of that worker there is room for them instead.

    Messages are numbered in the total order of the module's docstring. `graph` is the graph of the schedule, where the
    caller has made it already.

    Raises:
        ConfigError: `lookahead` is negative.
        ScheduleError: messages are explicit already, the timeline is another schedule's, or the schedule gets stuck.
    """
    if lookahead < 0:
        raise ConfigError(
            f"lookahead={lookahead}: give 0 or more, the actions before its reader by which a message may arrive"
        )
    if schedule.has_communication:
        raise ScheduleError(["messages are explicit already; communicate takes a compute-only schedule"])
    graph = graph or graph_of(schedule)
    order = message_order(schedule, graph, lookahead=lookahead, rooms=rooms)
    rank = order.ranks(_reached(schedule, graph, timeline))
    # Messages get their numbers in this order, so a message's slot is also its place among all messages.
    placed = [(behind, order.message(index)) for behind, index in order.placed(rank)]
    entries = _compute_entries(schedule, graph, rank)
    stages = schedule.placement.stages
    for slot, (behind, message) in enumerate(placed):
        send, recv = ends(message, slot)
        # The middle number puts messages after the computes and reductions of their place.
        entries[stages[message.source].worker].append(((behind, 1, slot), send))
        entries[stages[message.destination].worker].append(((behind, 1, slot), recv))
    for worker in entries:
        worker.sort(key=lambda entry: entry[0])
    return replace(
        schedule,
        messages=tuple(message for _, message in placed),
        orders=tuple(tuple(action for _, action in worker) for worker in entries),
    )


def _reached(schedule: Schedule, graph: Graph, timeline: Timeline) -> list[Seconds]:
    """The end of each event, by event, in seconds; never before the end of an event that it waits for."""
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
        # A measured timeline has clock errors, which must not put an action before one that it waits for.
        before = max(reached[graph.first[event]], reached[graph.second[event]])
        reached.append(max(before, ends_in_time.get(event, before)))
    return reached


def _compute_entries(
    schedule: Schedule, graph: Graph, rank: Sequence[int]
) -> list[list[tuple[tuple[int, int, int], Action]]]:
    """(sort key, action) of each action, by worker; ops of a whole stage stay after the compute that they follow.

    A reduction that several workers take part in has one key on all of them. Where a block is reduced once
    for each batch, the n-th reductions of all workers are one reduction.
    """
    stages, entries = schedule.placement.stages, []
    reductions = defaultdict[tuple[int, int], list[int]](list)  # (block, turn) -> the key on each worker
    for order, events in zip(schedule.orders, graph.events, strict=True):
        key, keyed, turns = -1, [], Counter[int]()  # -1: before the first compute
        for i, (action, event) in enumerate(zip(order, events, strict=True)):
            block = stages[action.stage].weights
            if action.op in TIMED_OPS:
                key = rank[event]
            elif action.op is Op.REDUCE_GRAD:
                reductions[block, turns[block]].append(key)
                turns[block] += 1
            keyed.append(((key, 0, i), action))
        entries.append(keyed)
    # Larger than any place in an order. So reductions that are shared come after a worker's own actions with the same
    # key, and by their blocks, alike on all workers.
    behind = max(map(len, schedule.orders))
    for keyed in entries:
        turns = Counter[int]()
        for place, (_, action) in enumerate(keyed):
            block = stages[action.stage].weights
            if action.op is Op.REDUCE_GRAD:
                keys = reductions[block, turns[block]]
                turns[block] += 1
                if len(keys) > 1:
                    keyed[place] = (max(keys), 0, behind + block), action
    return entries

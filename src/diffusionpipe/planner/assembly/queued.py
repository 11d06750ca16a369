"""Puts the messages of a schedule in the best of a few orders: by times without queues, then by times with them.

`communicate` puts messages in order by the times of a timeline. Without messages these times lack all waits of messages
for each other. Where links are slow, actions then come much later than the order expects, and a message that is needed
now waits in a queue for one that is needed later. Times with the queues of the first order give a second order.

    messages never wait     one order
    else                    simulate -> order 1 -> simulate with queues -> order 2; the faster one of both
    with fills              the same; order 3 from the times of order 2, as fills come at other times in each order;
                            and the best order without fills, with the messages of fills between its messages

On 4 devices with links of 1 Gb/s filled iterations are up to a fifth shorter so. `Structure.queued` has the first two
orders for estimates.
"""

from dataclasses import replace
from operator import itemgetter

from diffusionpipe.costs import Costs
from diffusionpipe.ir import COMPUTE_OPS, Op, Schedule, Span, Timeline
from diffusionpipe.passes import communicate
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import Graph, graph_of
from diffusionpipe.units import Seconds

QUEUED = 1.005
"""An iteration longer than this many times the one in which no message waits for another gets a second order: less
makes planning slower where that hardly matters."""
MORE, MORE_IF_FILLED = 1, 2
"""The orders of messages that are tried after the first one, without and with fills: more gain little."""


def are_waiting(queued: Seconds, unqueued: Seconds) -> bool:
    """Whether messages wait for each other so long that it counts, by the iteration's time with and without queues."""
    return queued > QUEUED * unqueued


def in_queues(schedule: Schedule, costs: Costs, *, unfilled: tuple[Schedule, Costs] | None = None) -> Schedule:
    """The schedule with explicit messages, in the best of the orders that are tried; see `timed_in_queues`."""
    return timed_in_queues(schedule, costs, unfilled=unfilled)[1]


def timed_in_queues(
    schedule: Schedule, costs: Costs, *, unfilled: tuple[Schedule, Costs] | None = None
) -> tuple[Seconds, Schedule]:
    """(seconds of the iteration, the schedule with explicit messages) for the best of the orders that are tried.

    Args:
        schedule: without messages.
        costs: the costs of that schedule.
        unfilled: where it has fills, the schedule without them and its costs: the best order of that one is tried too.

    Raises:
        ScheduleError: as `communicate`.
    """
    graph = graph_of(schedule)
    orders = _orders(schedule, costs, graph, MORE_IF_FILLED if unfilled else MORE)
    if unfilled and len(orders) > 1:
        _, timeline, _ = min(_orders(*unfilled, graph_of(unfilled[0]), MORE), key=itemgetter(0))
        explicit = communicate(schedule, _with_fills(schedule, timeline), graph=graph)
        orders.append((simulate(explicit, costs).makespan, timeline, explicit))
    seconds, _, explicit = min(orders, key=itemgetter(0))
    return seconds, explicit


def _orders(schedule: Schedule, costs: Costs, graph: Graph, more: int) -> list[tuple[Seconds, Timeline, Schedule]]:
    """(seconds of the iteration, times that gave the order, schedule) of each order of messages that is tried.

    There is one order if messages hardly wait for each other in it, else it is followed by `more` others.
    """
    timeline = unqueued = simulate(schedule, costs, graph=graph)
    found: list[tuple[Seconds, Timeline, Schedule]] = []
    while len(found) <= more:
        explicit = communicate(schedule, timeline, graph=graph)
        queued = simulate(explicit, costs)
        found.append((queued.makespan, timeline, explicit))
        # Where nothing waits, times with queues give the same order again.
        if not are_waiting(found[0][0], unqueued.makespan):
            break
        timeline = queued
    return found


def _with_fills(schedule: Schedule, timeline: Timeline) -> Timeline:
    """The timeline with the fills of `schedule` added, each at the end of the compute that follows it, in no time.

    So a fill's message comes late in an order of messages: it is surely ready, and no other message waits for it.
    """
    ends = {span.action: span.end for span in timeline.spans}
    spans = list(timeline.spans)
    for worker, order in enumerate(schedule.orders):
        following = timeline.makespan
        # A fill at the end of its order has nothing after it but the end.
        for action in reversed(order):
            if action.op is Op.ENCODE:
                spans.append(Span(worker=worker, action=action, start=following, end=following))
            elif action.op in COMPUTE_OPS:
                following = ends[action]
    return replace(timeline, spans=tuple(spans))

"""Schedule x costs -> Timeline."""

from diffusionpipe.costs import Costs
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Schedule, Span, Timeline
from diffusionpipe.timing import Graph, Streams, Times, graph_of, machine_of, times_of
from diffusionpipe.timing.held import memory_of


def simulate(
    schedule: Schedule, costs: Costs, *, streams: Streams = Streams.DIRECTION, graph: Graph | None = None
) -> Timeline:
    """The timeline of a schedule at these costs: start and end of every action, and activation memory over time.

    Without explicit messages an edge between workers takes the time of its tensors on the link, beside all others. With
    them every transfer waits for its streams and for both its ends, as `timing.machine` describes; the span of a SEND
    and of its RECV is the span of the transfer. A gradient reduction starts when it is issued on all replicas and runs
    beside the rest; so does the gathering of a sharded block, for which its compute waits. Hosts issue the computes of
    their workers, and the span of one that waits for its host is as long as both take. Times stay exact where the costs
    are integers or Fractions and links have no bandwidth. `graph` is the graph of the schedule on these streams, where
    the caller has made it already.

    Raises:
        ScheduleError: the schedule gets stuck, or the costs belong to another one.
    """
    placement = schedule.placement
    if len(costs.stages) != len(placement.stages) or len(costs.fills) != len(schedule.fills):
        have = f"{len(costs.stages)} stages and {len(costs.fills)} fills"
        want = f"{len(placement.stages)} stages and {len(schedule.fills)} fills"
        raise ScheduleError([f"the costs are for {have}, but the schedule has {want}; make costs for this schedule"])
    times = times_of(graph or graph_of(schedule, machine_of(streams)), costs)
    return Timeline(
        num_workers=schedule.num_workers,
        spans=_spans(schedule, times),
        memory=memory_of(schedule, costs, times),
    )


def _spans(schedule: Schedule, times: Times) -> tuple[Span, ...]:
    starts, ends = times.starts(), times.ends
    return tuple(
        Span(worker=worker, action=action, start=starts[event], end=ends[event])
        for worker, order in enumerate(schedule.orders)
        for action, event in zip(order, times.graph.events[worker], strict=True)
    )

"""When hosts have issued what their devices compute: the second resource of a worker.

A host issues the computes of its order one after the other and waits for no device. So when it issues one depends on
nothing but the order, and needs no event of the graph. A compute starts no earlier than its host begins to issue it,
and ends no earlier than all of it has been issued. Here the device needs 2 for a forward, and the host 3; the device
waits for the host, and the worker is host-bound:

    host       --0F0-- --0F1--
    device     0F0===| 0F1===|            ends at 3 and at 6

>>> from diffusionpipe.schedules import forward_only
>>> from diffusionpipe.timing.graph import graph_of
>>> graph = graph_of(forward_only(1, 2))
>>> issues_of(graph, [0, 3])
[(0, 0), (0, 3), (3, 6)]
"""

from collections.abc import Sequence

from diffusionpipe.timing.graph import Graph
from diffusionpipe.units import Seconds

Issue = tuple[Seconds, Seconds]
"""(time at which a host begins to issue an event, time at which it has issued it), in seconds."""


def issues_of(graph: Graph, host_times: Sequence[Seconds]) -> list[Issue]:
    """(begin, end) in seconds of the issue of each event by its host, by event; (0, 0) where it occupies no host.

    [] if all host times are 0. `host_times`: for each of `graph.works` the seconds in which a host issues it.
    """
    if not any(host_times):
        return []
    issues: list[Issue] = [(0, 0)] * len(graph)
    for events in graph.events:
        now: Seconds = 0
        for event in events:
            if seconds := host_times[graph.work[event]]:
                issues[event] = now, now + seconds
                now += seconds
    return issues

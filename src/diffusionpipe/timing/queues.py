"""A schedule's messages in queues, in one order after the other: a graph without making the schedule's actions again.

Without explicit messages a transfer waits for the action that produces it [1]. With them it waits for four others [2]:
the last action before it on the host and the last transfer before it in the queue, at both its ends. Nothing else
changes, as SEND and RECV occupy no host. So what `graph_of` says of a schedule without messages is kept, and only
transfers get other waits, in a new numbering that follows the order.

    worker 0   0F0 0F1        event   1 0F0   2 0F1   3 transfer   4 transfer   5 1F0   6 1F1
    worker 1       1F0 1F1    first   0       1       1            2            0       5
                              second  0       0       0            0            3       4

>>> from diffusionpipe.schedules import forward_only
>>> from diffusionpipe.timing.graph import graph_of
>>> graph = graph_of(forward_only(2, 2))
>>> work = graph.works[graph.work[3]]
>>> hops = [QueuedTransfer(events=(event,), work=work, hosts=(0, 1), queues=(0, 1)) for event in (3, 4)]
>>> queued = Queues.of(graph, computes=(1, 2, 5, 6), hops=hops)
>>> graph = queued.graph([1, 2, 5, 6], [(0, 0), (1, 1)])    # each transfer behind its producer: 0F0 [0] 0F1 [1] ...
>>> len(graph), graph.first[-2:], graph.second[-2:]     # 1F0 and 1F1 behind their hosts and their transfers
(8, (0, 6), (3, 5))
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diffusionpipe.timing.graph import START, Graph
from diffusionpipe.timing.work import Transfer, Work


class QueuedTransfer(NamedTuple):
    """A transfer between workers: its work, and the hosts and queues of both ends."""

    events: tuple[int, ...]
    """Its events in the graph without explicit messages; several where a message brings tensors for several stages."""
    work: Transfer
    """The transfer that the message makes."""
    hosts: tuple[int, int]
    """The workers at both ends of the transfer: sender, receiver."""
    queues: tuple[int, int]
    """The numbers of the queues on which it runs at both ends; queues of different workers have different numbers."""


_Row = tuple[int, int, int]
"""(event, first event that it waits for, second event that it waits for)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """The graph of a schedule without explicit messages, prepared so that each order of messages gives a graph fast."""

    unqueued: Graph
    """The graph without explicit messages."""
    hops: tuple[QueuedTransfer, ...]
    """The transfers to put in order."""
    rows: tuple[tuple[_Row, ...], ...]
    """The rows of each event of the unqueued graph, by event: one, and more where it waits for more than two others."""
    others: tuple[tuple[int, tuple[int, ...]], ...]
    """(event, events that it waits for) of each event that is neither a compute nor a transfer, such as a reduction."""
    worker_of: tuple[int, ...]
    """The worker of each action, by event."""
    work: tuple[int, ...]
    """The index of each event's work in `works`, by event; the work of a hop is at its first event."""
    works: tuple[Work, ...]

    @classmethod
    def of(cls, graph: Graph, *, computes: Sequence[int], hops: Sequence[QueuedTransfer]) -> "Queues":
        """The prepared form of a graph without explicit messages, for its transfers `hops`.

        `computes` are the other events that `graph` puts in order, the actions of the workers.
        """
        has_place = {*computes, *(event for hop in hops for event in hop.events)}
        index_of, work = {one: index for index, one in enumerate(graph.works)}, list(graph.work)
        for hop in hops:
            work[hop.events[0]] = index_of.setdefault(hop.work, len(index_of))
        worker_of = [0] * len(graph)
        for worker, events in enumerate(graph.events):
            for event in events:
                worker_of[event] = worker
        rows: list[tuple[_Row, ...]] = [()] * len(graph)
        others = []
        joined: list[_Row] = []  # events without work that stand before the one that waits for more than two
        for event in range(START + 1, len(graph)):
            joined.append((event, graph.first[event], graph.second[event]))
            # Events without work before one that waits for more than two others: they belong to its rows.
            if not (graph.work[event] or graph.is_on_host[event] or event in has_place):
                continue
            rows[event] = tuple(joined)
            if event not in has_place:
                own = {one for one, *_ in joined}
                others.append((event, tuple(e for _, a, b in joined for e in (a, b) if e not in own)))
            joined = []
        return cls(
            unqueued=graph,
            hops=tuple(hops),
            rows=tuple(rows),
            others=tuple(others),
            worker_of=tuple(worker_of),
            work=tuple(work),
            works=tuple(index_of),
        )

    def graph(self, computes: Sequence[int], placed: Sequence[tuple[int, int]]) -> Graph:
        """The graph of the schedule with explicit messages, which are started in a given order.

        Args:
            computes: the events of the computes, in order.
            placed: (index of the compute after which it comes, index in `hops`) of each transfer, in order; -1: before
                all computes.
        """
        graph, rows = self.unqueued, self.rows
        number = [START] * len(graph)
        first, second, sources = [START], [START], [START]  # sources: the events in `graph`, START for joins
        hosts = [START] * len(graph.events)
        num_queues = 1 + max((queue for hop in self.hops for queue in hop.queues), default=0)
        # -1 is not an event: the first transfer of a queue waits for its host, even where that is at the start.
        queues, issued_behind = [START] * num_queues, [-1] * num_queues
        behind = self._behind(computes)
        pending = iter((*placed, (len(computes), -1)))
        place, transfer = next(pending)
        for index in range(-1, len(computes)):
            events = behind.get(index, ())
            # Index -1: transfers of frozen outputs that come before all computes.
            for event in (computes[index], *events) if index >= 0 else events:
                for one, a, b in rows[event]:
                    number[one] = len(first)
                    first.append(number[a])
                    second.append(number[b])
                    sources.append(one)
                if graph.is_on_host[event]:
                    hosts[self.worker_of[event]] = len(first) - 1
            while place <= index:  # [2]
                hop = self.hops[transfer]
                (sender, receiver), (here, there) = hop.hosts, hop.queues
                waits = [queues[here]]
                if queues[there] != waits[0]:
                    waits.append(queues[there])
                for host, queue in ((hosts[sender], here), (hosts[receiver], there)):
                    if issued_behind[queue] != host:  # else what was issued before it has waited for the host
                        waits.append(host)
                        issued_behind[queue] = host
                while len(waits) > 2:
                    first.append(waits.pop())
                    second.append(waits.pop())
                    sources.append(START)
                    waits.append(len(first) - 1)
                queues[here] = queues[there] = len(first)
                for event in hop.events:
                    number[event] = len(first)
                first.append(waits[0])
                second.append(waits[-1])
                sources.append(hop.events[0])
                place, transfer = next(pending)
        return Graph(
            first=tuple(first),
            second=tuple(second),
            work=tuple([self.work[event] for event in sources]),
            is_on_host=tuple([graph.is_on_host[event] for event in sources]),
            works=self.works,
            events=tuple(tuple([number[event] for event in events]) for events in graph.events),
            tails=tuple([number[tail] for tail in graph.tails]),
        )

    def _behind(self, computes: Sequence[int]) -> dict[int, list[int]]:
        """Index of a compute -> the events in `others` that can happen once it and all computes before it have."""
        found: dict[int, list[int]] = defaultdict(list)
        if self.others:
            rank = [-1] * len(self.unqueued)
            for index, event in enumerate(computes):
                rank[event] = index
            for event, waits in self.others:
                rank[event] = max(rank[one] for one in waits)
                found[rank[event]].append(event)
        return found

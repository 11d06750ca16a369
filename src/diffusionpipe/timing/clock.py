"""When the events of a graph happen: the one loop that all times of schedules come from.

    end of an event = the later end of the two that it waits for + its time
                    + on a host after a wait: the extra time (`costs.waking`)
                    and not before its host has issued it (`timing.issues`)

Times stay exact where the prices are integers or Fractions. They need not grow with the prices where waking counts: an
action that comes 10 ms earlier may leave a wait of 10 ms after it, after which the next one takes 2 ms longer. So
critical path and latest starts speak of the durations as they came out, waking included.

    worker 0   0F0 0F1                 0F0 0F1          a forward takes 2, a transfer 1
    worker 1           1F0 1F1            =1F0=1F1      [1] the later of host and input, [2] and the time

>>> from diffusionpipe.schedules import forward_only
>>> from diffusionpipe.timing.graph import graph_of
>>> graph = graph_of(forward_only(2, 2))
>>> times = timed(graph, [1 if "Transfer" in str(work) else 2 for work in graph.works])
>>> [[times.ends[event] for event in events] for events in graph.events]
[[2, 4], [5, 7]]
>>> times.makespan, times.critical_path()
(7, [6, 5, 3, 1])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.costs.waking import wake_time
from diffusionpipe.timing.graph import START, Graph
from diffusionpipe.timing.issues import Issue, issues_of
from diffusionpipe.units import Seconds

Waking = Sequence[tuple[Seconds, Seconds]]
"""(wait, extra time of an action after a wait of this length) for some lengths, in seconds; see `costs.waking`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The end of each event of a graph, in seconds from the start of the iteration, and when hosts issue it."""

    graph: Graph
    ends: Sequence[Seconds]
    """The end of each event, by event, in seconds."""
    issues: Sequence[Issue] = ()
    """The times at which hosts issue the events, by event; () where hosts take no time."""

    def start(self, event: int) -> Seconds:
        """The start of an event in seconds: the later end of the two that it waits for, or when its host issues it."""
        # A comparison in place of `max`, here and below: searches ask for the times of millions of events.
        first, second = self.ends[self.graph.first[event]], self.ends[self.graph.second[event]]
        later = second if second > first else first
        return max(later, self.issues[event][0]) if self.issues else later

    def starts(self) -> list[Seconds]:
        """The start of every event, by event, in seconds."""
        ends = self.ends
        if self.issues:
            return [self.start(event) for event in range(len(ends))]
        pairs = zip(self.graph.first, self.graph.second, strict=True)
        return [ends[b] if ends[b] > ends[a] else ends[a] for a, b in pairs]

    @property
    def makespan(self) -> Seconds:
        """The end of the event that ends last, in seconds from the start of the iteration."""
        return max(self.ends)

    def critical_path(self, last: int | None = None) -> list[int]:
        """The numbers of events that follow each other without waits up to the end of `last`, last one first.

        `last` is the event with the latest end by default. The path ends early at an event that waits for its host,
        which has been busy from the start. Only if an event of the path takes less time can that end come earlier, as
        long as no action's waking changes.
        """
        ends, graph = self.ends, self.graph
        event = max(range(len(ends)), key=ends.__getitem__) if last is None else last
        path = []
        while event != START:
            path.append(event)
            first, second = graph.first[event], graph.second[event]
            before = second if ends[second] > ends[first] else first
            # It waited for its host. An issue is not an event (`timing.issues`), so the path cannot be followed
            # further.
            if self.issues and (ends[event] == self.issues[event][1] or self.start(event) > ends[before]):
                break
            event = before
        return path

    def latest_starts(self, makespan: Seconds) -> list[Seconds]:
        """The latest start of each event with which an iteration still takes `makespan` seconds, by event.

        Durations are the ones that came out, waking included.
        """
        first, second, ends = self.graph.first, self.graph.second, self.ends
        latest = [makespan] * len(ends)  # of ends at first, of starts in the end
        # Numbers grow along all waits, so those who wait for an event have set its latest end before its turn.
        for event in range(len(ends) - 1, START, -1):
            a, b = first[event], second[event]
            if self.issues:
                begun = self.start(event)
            else:
                begun, arrival = ends[a], ends[b]  # as `start`, without a call for each event
                if arrival > begun:
                    begun = arrival
            start = latest[event] - (ends[event] - begun)
            latest[event] = start
            if start < latest[a]:
                latest[a] = start
            if start < latest[b]:
                latest[b] = start
        return latest


def timed(graph: Graph, prices: Sequence[Seconds], *, waking: Waking = (), host_times: Sequence[Seconds] = ()) -> Times:
    """The times of all events if each work takes its price in seconds.

    `prices` and `host_times`, the seconds in which hosts issue works, have one entry for each of `graph.works`. () as
    `host_times`: hosts take no time. `waking`: the extra time of an action after a wait.
    """
    issues = issues_of(graph, host_times)
    ends = ends_of(graph, durations_of(graph, prices), waking=waking, issues=issues)
    return Times(graph=graph, ends=ends, issues=issues)


def durations_of(graph: Graph, prices: Sequence[Seconds]) -> list[Seconds]:
    """The seconds of each event without waking, by event, from the price of each of `graph.works`."""
    return [prices[work] for work in graph.work]


def ends_of(
    graph: Graph,
    durations: Sequence[Seconds],
    *,
    waking: Waking = (),
    issues: Sequence[Issue] = (),
    before: Sequence[Seconds] = (0,),
) -> list[Seconds]:
    """The end of each event, by event, in seconds from the start of the iteration.

    Args:
        graph: the events.
        durations: by event its time without waking.
        waking: the extra time of an action after a wait.
        issues: by event when its host issues it; () where hosts take no time.
        before: the ends of the first events, which have not changed; at least the end of the start.
    """
    ends = list(before)
    append, known = ends.append, len(ends)
    # An event waits for smaller numbers only, so the ends before the first change are still right.
    rows = zip(graph.first[known:], graph.second[known:], durations[known:], strict=True)
    # A loop for each case: the usual one, without hosts and waking, has no branch but the comparison.
    if issues:
        for (first, second, duration), issue, is_on_host in zip(
            rows, issues[known:], graph.is_on_host[known:], strict=True
        ):
            append(_end(ends[first], ends[second], duration, issue, waking if is_on_host else ()))
        return ends
    if not waking:
        for first, second, duration in rows:
            start, arrival = ends[first], ends[second]
            append((arrival if arrival > start else start) + duration)  # [1] + [2]
        return ends
    for (first, second, duration), is_on_host in zip(rows, graph.is_on_host[known:], strict=True):
        start, arrival = ends[first], ends[second]
        # `first` is the event before it on its host, so a later arrival means that the host waited.
        if arrival > start:
            extra = wake_time(waking, arrival - start, duration) if is_on_host else 0
            # Duration and extra time are added first: with an extra time of 0, the end equals the one without waking to
            # the last bit.
            append(arrival + (duration + extra))
        else:
            append(start + duration)
    return ends


def _end(free: Seconds, arrival: Seconds, duration: Seconds, issue: Issue, waking: Waking) -> Seconds:
    """The end of an event in seconds, with its waking.

    Args:
        free: when its device or queue is free.
        arrival: when its input is there.
        duration: its time without waking.
        issue: when its host begins to issue it, and when it has issued it.
        waking: the extra time of an action after a wait; () if the event has none.
    """
    begun, issued = issue
    ready = max(arrival, begun)
    extra = wake_time(waking, ready - free, duration) if waking and ready > free else 0
    return max(max(free, ready) + (duration + extra), issued)


Decide = Callable[[int, int, Seconds, Seconds], Seconds]
"""A function from (event of an action, event of the room before it, time at which the host is free, time at which the
input is there) to the seconds of work to put into the room."""


def ends_with_rooms(
    graph: Graph,
    durations: Sequence[Seconds],
    decide: Decide,
    *,
    room_before: Mapping[int, int],
    waking: Waking = (),
    issues: Sequence[Issue] = (),
) -> list[Seconds]:
    """The end of each event, by event, in seconds, if the work in rooms is decided as time passes.

    Args:
        graph: a graph with rooms.
        durations: by event its time without waking; the entries of rooms are not read.
        decide: gives the seconds of work in a room, when the action after it comes; called in an order in which the
            actions can happen.
        room_before: the event of an action -> the event of its room, which nothing else waits for.
        waking: the extra time of an action after a wait.
        issues: by event when its host issues it, for actions; () where hosts take no time.
    """
    ends: list[Seconds] = [0]
    append = ends.append
    rows = zip(graph.first, graph.second, durations, graph.is_on_host, strict=True)
    next(rows)  # that of the start
    for event, (first, second, duration, is_on_host) in enumerate(rows, START + 1):
        arrival = ends[second]
        if event in room_before:
            room = room_before[event]
            # The room's work may begin as soon as the host is free; the input that the action waits for does not matter
            # to it.
            free = ends[graph.first[room]]
            ends[room] = free + decide(event, room, free, arrival)
        start = ends[first]
        if issues:
            append(_end(start, arrival, duration, issues[event], waking if is_on_host else ()))
        elif arrival > start:
            extra = wake_time(waking, arrival - start, duration) if waking and is_on_host else 0
            append(arrival + (duration + extra))
        else:
            append(start + duration)
    return ends

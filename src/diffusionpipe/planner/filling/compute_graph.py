"""The graph of one iteration's compute with rooms for frozen work: its times, and the effect of fills on them.

Before each action of a worker's host, and after its last one, there is a room (`timing.work.Room`), an event whose
duration is the frozen work that is put there. Work in a room delays nothing as long as it ends before the earliest
start of the action after it. It lengthens no iteration of time T as long as it ends before that action's latest start
for T, as long as other work also ends before its latest end: latest times are a timetable that respects every wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from diffusionpipe.costs import Costs
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import MESSAGE_OPS, Schedule
from diffusionpipe.timing import Graph, Times, ends_of, graph_of, prices_of
from diffusionpipe.timing.clock import Waking, durations_of
from diffusionpipe.timing.issues import Issue, issues_of
from diffusionpipe.timing.prices import host_times_of
from diffusionpipe.timing.work import Room, Work
from diffusionpipe.units import Seconds

Place = tuple[int, int]
"""(worker, position in its order) before which frozen work can be put; the length of the order is its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A wait of a worker: from the end of an action, or 0, to the earliest start of the next, in seconds."""

    position: int
    """The index of the next action in the worker's order."""
    start: Seconds
    end: Seconds


@dataclass(frozen=True, kw_only=True)
class ComputeGraph:
    """The events of a schedule with an empty room before each action, and their times."""

    graph: Graph
    durations: tuple[Seconds, ...]
    """The duration of each event without waking, by event, in seconds; 0 for rooms."""
    waking: Waking
    """The extra times that actions take after waits."""
    issues: tuple[Issue, ...]
    """The times at which each event's host issues it, by event, without the work that is put into rooms."""

    @property
    def num_workers(self) -> int:
        """The number of workers of the schedule."""
        return len(self.graph.tails)

    @cached_property
    def rooms(self) -> Mapping[Place, int]:
        """(worker, position in its order) -> the event of the room there, worker by worker in order."""
        works = self.graph.works
        found = {}
        for event, index in enumerate(self.graph.work):
            work = works[index]
            if isinstance(work, Room):
                found[work.worker, work.position] = event
        return dict(sorted(found.items()))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The positions of each worker's rooms, by worker; the last one is the end of its order."""
        found: list[list[int]] = [[] for _ in range(self.num_workers)]
        for worker, position in self.rooms:
            found[worker].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def place_of(self) -> Mapping[int, Place]:
        """Event of a room -> its (worker, position in the worker's order)."""
        return {event: place for place, event in self.rooms.items()}

    @cached_property
    def action_behind(self) -> Mapping[int, int]:
        """Event of an action -> the event of the room before it."""
        # On its host the event before an action is its room.
        return {event: first for event, first in enumerate(self.graph.first) if first in self.place_of}

    @cached_property
    def busy(self) -> tuple[Seconds, ...]:
        """The seconds for which each worker computes, by worker, without waking."""
        busy = [0.0] * self.num_workers
        for event, room in self.action_behind.items():
            busy[self.place_of[room][0]] += self.durations[event]
        return tuple(busy)

    @cached_property
    def times(self) -> Times:
        """The earliest times of all events if all rooms are empty."""
        return self._timed(self.durations)

    @cached_property
    def makespan(self) -> Seconds:
        """The seconds of the iteration without fills, from its start to the end of the last reduction."""
        return self.times.makespan

    @cached_property
    def ends(self) -> tuple[Seconds, ...]:
        """The end of each worker's last action, by worker, in seconds, with empty rooms."""
        return tuple(self.times.ends[tail] for tail in self.graph.tails)

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """The waits of each worker before its last action, by worker, in order."""
        found: list[list[Gap]] = [[] for _ in range(self.num_workers)]
        for event, room in self.action_behind.items():
            free, start = self.times.ends[room], self.times.start(event)
            if start > free:
                worker, position = self.place_of[room]
                found[worker].append(Gap(position=position, start=free, end=start))
        return tuple(tuple(sorted(gaps, key=lambda gap: gap.position)) for gaps in found)

    def is_shifted(self, times: Times) -> bool:
        """Whether at `times` some action ends later than it does without fills."""
        # Later by more than rounding.
        return any(times.ends[event] > self.times.ends[event] * (1 + 1e-12) for event in self.action_behind)

    def filled(self, work: Mapping[Place, Seconds]) -> Times:
        """The times of all events if frozen work runs in rooms; `work`: (worker, position) -> its seconds there."""
        durations = list(self.durations)
        for place, seconds in work.items():
            durations[self.rooms[place]] = seconds
        return self._timed(durations)

    def _timed(self, durations: Sequence[Seconds]) -> Times:
        ends = ends_of(self.graph, durations, waking=self.waking, issues=self.issues)
        return Times(graph=self.graph, ends=ends, issues=self.issues)


def compute_graph(schedule: Schedule, costs: Costs) -> ComputeGraph:
    """The graph of a schedule without frozen work, with an empty room before each action, priced at these costs.

    Explicit messages wait for each other in their queues. The positions of rooms do not count messages.

    Raises:
        ScheduleError: the schedule has frozen work, or its actions wait for each other in a circle.
    """
    if schedule.fills:
        raise ScheduleError(["plan the fills before fills are inserted"])
    graph = graph_of(schedule, has_rooms=True)
    if schedule.has_communication:
        graph = replace(graph, works=_without_messages(schedule, graph.works))
    durations = durations_of(graph, prices_of(graph.works, costs))
    issues = issues_of(graph, host_times_of(graph.works, costs))
    return ComputeGraph(graph=graph, durations=tuple(durations), waking=costs.waking, issues=tuple(issues))


def _without_messages(schedule: Schedule, works: Sequence[Work]) -> tuple[Work, ...]:
    """The works of a graph whose rooms have their positions in orders without messages; other works stay the same."""
    counts = [
        tuple(accumulate((action.op not in MESSAGE_OPS for action in order), initial=0)) for order in schedule.orders
    ]
    return tuple(
        Room(work.worker, counts[work.worker][work.position]) if isinstance(work, Room) else work for work in works
    )

"""The compute of one iteration as a graph: earliest and latest times, with room for work between its nodes.

Nodes are compute actions and gradient reductions in an order in which they can run. A worker's actions follow each
other; a reduction runs beside them. Whatever is put between two actions of a worker delays nothing as long as it ends
before the earliest start of the second; it lengthens no iteration of time T as long as it ends before its latest start
for T, wherever else other things end before theirs: latest times are a timetable that respects every edge.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from diffusionpipe.costs import Costs
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.ir.flows import TIMED_OPS, flows
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Where a worker waits: from the end of an action, or 0, to the earliest start of the next."""

    position: int
    """Index of that next action in the worker's order."""
    start: Seconds
    end: Seconds


@dataclass(frozen=True, kw_only=True)
class ComputeGraph:
    """Tuples with one entry per node, in an order in which the nodes can run."""

    num_workers: int
    worker: tuple[int, ...]
    """-1 for a reduction."""
    position: tuple[int, ...]
    """Index in the worker's order; -1 for a reduction."""
    seconds: tuple[Seconds, ...]
    inputs: tuple[tuple[tuple[int, Seconds], ...], ...]
    """(node, time that must pass after it); the previous action of the worker is not among them."""
    lengths: tuple[int, ...]
    """Actions in the order of each worker."""

    @cached_property
    def busy(self) -> tuple[Seconds, ...]:
        """Compute of each worker."""
        busy = [0.0] * self.num_workers
        for worker, seconds in zip(self.worker, self.seconds, strict=True):
            if worker >= 0:
                busy[worker] += seconds
        return tuple(busy)

    @cached_property
    def starts(self) -> tuple[Seconds, ...]:
        """Earliest start of each node."""
        starts: list[Seconds] = []
        ends: list[Seconds] = []
        host = [0.0] * self.num_workers
        for worker, seconds, inputs in zip(self.worker, self.seconds, self.inputs, strict=True):
            start = host[worker] if worker >= 0 else 0.0
            for node, lag in inputs:
                start = max(start, ends[node] + lag)
            starts.append(start)
            ends.append(start + seconds)
            if worker >= 0:
                host[worker] = start + seconds
        return tuple(starts)

    @cached_property
    def earliest(self) -> tuple[Seconds, ...]:
        """Earliest end of each node."""
        return tuple(start + seconds for start, seconds in zip(self.starts, self.seconds, strict=True))

    @cached_property
    def makespan(self) -> Seconds:
        """Time of the iteration without fills, reductions included."""
        return max(self.earliest, default=0.0)

    @cached_property
    def ends(self) -> tuple[Seconds, ...]:
        """End of the last action of each worker."""
        ends = [0.0] * self.num_workers
        for worker, end in zip(self.worker, self.earliest, strict=True):
            if worker >= 0:
                ends[worker] = end
        return tuple(ends)

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """For each worker its waits before its last action, in order."""
        found: list[list[Gap]] = [[] for _ in range(self.num_workers)]
        host = [0.0] * self.num_workers
        for node, worker in enumerate(self.worker):
            if worker >= 0:
                start = self.starts[node]
                if start > host[worker]:
                    found[worker].append(Gap(position=self.position[node], start=host[worker], end=start))
                host[worker] = self.earliest[node]
        return tuple(tuple(gaps) for gaps in found)

    def latest_starts(self, makespan: Seconds) -> list[Seconds]:
        """Latest start of each node in an iteration of this time."""
        ends = [makespan] * len(self.worker)
        host = [makespan] * self.num_workers
        starts = [0.0] * len(self.worker)
        for node in range(len(self.worker) - 1, -1, -1):
            worker = self.worker[node]
            end = min(ends[node], host[worker]) if worker >= 0 else ends[node]
            starts[node] = start = end - self.seconds[node]
            if worker >= 0:
                host[worker] = start
            for source, lag in self.inputs[node]:
                ends[source] = min(ends[source], start - lag)
        return starts


def compute_graph(schedule: Schedule, costs: Costs) -> ComputeGraph:
    """The graph of a schedule without frozen work and explicit messages.

    Raises:
        ScheduleError: it has either, or waits in a circle.
    """
    if schedule.has_communication or schedule.fills:
        raise ScheduleError(["plan the fills before fills are inserted and messages are made explicit"])
    nodes = [(w, i) for w, order in enumerate(schedule.orders) for i, a in enumerate(order) if a.op in TIMED_OPS]
    number = {schedule.orders[w][i]: node for node, (w, i) in enumerate(nodes)}
    seconds = [costs.seconds(schedule.orders[w][i]) for w, i in nodes]
    inputs: list[list[tuple[int, Seconds]]] = [[] for _ in nodes]
    stages = schedule.placement.stages
    for flow in flows(schedule):
        source, destination = stages[flow.source].worker, stages[flow.destination].worker
        lag = 0.0
        if source != destination:
            num_bytes = len(flow.samples) * sum(costs.tensor_bytes.get(name, 0) for name in flow.tensors)
            lag = costs.link_between(source, destination).transfer(num_bytes)
        inputs[number[flow.consumer]] += [(number[producer], lag) for producer in flow.producers]
    reductions = _reductions(schedule, costs, number)
    for time, sources in reductions:
        seconds.append(time)
        inputs.append([(source, 0.0) for source in sources])
    where = nodes + [(-1, -1)] * len(reductions)
    return _sorted(schedule, where, seconds, inputs)


def _reductions(schedule: Schedule, costs: Costs, number: dict[Action, int]) -> list[tuple[Seconds, list[int]]]:
    """For each reduced block its time and the nodes that it waits for; it starts once issued on all its workers.

    Reductions of a worker run one after the other, so a reduction also waits for the one before it on each worker.
    """
    stages = schedule.placement.stages
    issued: dict[int, list[int]] = defaultdict(list)
    before: dict[int, set[int]] = defaultdict(set)
    time: dict[int, Seconds] = defaultdict(float)
    for order in schedule.orders:
        last, previous = None, None
        for action in order:
            if action.op in TIMED_OPS:
                last = number[action]
            elif action.op is Op.REDUCE_GRAD:
                block = stages[action.stage].weights
                issued[block] += [last] if last is not None else []
                before[block] |= {previous} if previous is not None else set()
                time[block] = max(time[block], costs.reduces[action.stage] if costs.reduces else 0.0)
                previous = block
    first = len(number)
    index = {block: first + i for i, block in enumerate(issued)}
    return [(time[b], issued[b] + [index[other] for other in sorted(before[b])]) for b in index]


def _sorted(
    schedule: Schedule,
    where: Sequence[tuple[int, int]],
    seconds: Sequence[Seconds],
    inputs: Sequence[Sequence[tuple[int, Seconds]]],
) -> ComputeGraph:
    """The graph with its nodes renumbered in an order in which they can run."""
    readers: list[list[int]] = [[] for _ in where]
    waits = [len(sources) for sources in inputs]
    for node, sources in enumerate(inputs):
        for source, _ in sources:
            readers[source].append(node)
    for node in range(1, len(where)):
        if where[node][0] >= 0 and where[node][0] == where[node - 1][0]:
            readers[node - 1].append(node)
            waits[node] += 1
    order = [node for node, count in enumerate(waits) if not count]
    for node in order:  # grows while it is read
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                order.append(reader)
    if len(order) < len(where):
        raise ScheduleError([f"{len(where) - len(order)} actions wait in a circle; check the schedule first"])
    number = {node: i for i, node in enumerate(order)}
    return ComputeGraph(
        num_workers=schedule.num_workers,
        worker=tuple(where[node][0] for node in order),
        position=tuple(where[node][1] for node in order),
        seconds=tuple(seconds[node] for node in order),
        inputs=tuple(tuple((number[source], lag) for source, lag in inputs[node]) for node in order),
        lengths=tuple(len(actions) for actions in schedule.orders),
    )

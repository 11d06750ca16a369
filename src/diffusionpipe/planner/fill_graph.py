"""The compute of one iteration as a graph: earliest and latest times, with room for work between its nodes.

Nodes are compute actions, gradient reductions and gathers of sharded blocks in an order in which they can run. A
worker's actions follow each other; reductions and gathers run beside them. Whatever is put between two actions of a
worker delays nothing as long as it ends before the earliest start of the second; it lengthens no iteration of time T as
long as it ends before its latest start for T, wherever else other things end before theirs: latest times are a
timetable that respects every edge.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from diffusionpipe.costs import Costs
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.ir.execution import gathers, lone_blocks
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
    """-1 for a reduction or a gather."""
    position: tuple[int, ...]
    """Index in the worker's order; -1 for a reduction or a gather."""
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
    collectives = _collectives(schedule, costs, number)
    for node, one in enumerate(collectives, start=len(nodes)):
        seconds.append(one.seconds)
        inputs.append([(source, 0.0) for source in one.issued])
        for reader in one.readers:
            inputs[reader].append((node, 0.0))
    where = nodes + [(-1, -1)] * len(collectives)
    return _sorted(schedule, where, seconds, inputs)


@dataclass(slots=True)
class _Collective:
    """A reduction, or the gathering of a sharded block."""

    seconds: Seconds
    issued: list[int]
    """The compute nodes behind which its workers start it."""
    before: set[Hashable]
    """What runs before it on their streams."""
    readers: list[int]
    """The compute nodes that wait for it."""


def _collectives(schedule: Schedule, costs: Costs, number: Mapping[Action, int]) -> list[_Collective]:
    """All reductions and gathers, each after those that it waits for.

    They start once issued on all their workers, and those of a worker run one after the other.
    """
    stages, lone = schedule.placement.stages, lone_blocks(schedule)
    found: dict[Hashable, _Collective] = {}
    for worker, (order, gathered) in enumerate(zip(schedule.orders, gathers(schedule), strict=True)):
        last, previous, reader = None, None, dict(gathered)
        for i, action in enumerate(order):
            if action.op in TIMED_OPS:
                last = number[action]
            if action.op not in (Op.REDUCE_GRAD, Op.UNSHARD):
                continue
            block = stages[action.stage].weights
            key: Hashable = (worker, i) if action.op is Op.UNSHARD or block in lone else block
            one = found.setdefault(key, _Collective(0.0, [], set(), []))
            times = costs.unshards if action.op is Op.UNSHARD else costs.reduces
            one.seconds = max(one.seconds, times[action.stage] if times else 0.0)
            one.issued += [last] if last is not None else []
            one.before |= {previous} if previous is not None else set()
            one.readers += [number[reader[i]]] if i in reader else []
            previous = key
    index = {key: len(number) + i for i, key in enumerate(found)}
    for one in found.values():
        one.issued += sorted(index[key] for key in one.before)
    return list(found.values())


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

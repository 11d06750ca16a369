"""The parts of a candidate's schedule that no time changes: its waits, and the layers of each worker."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Edge, Op, Range, Schedule, Sharded
from diffusionpipe.ir.flows import ends
from diffusionpipe.passes import (
    bring_parameters,
    connect_blocks,
    gathers_first,
    insert_encoding,
    reduce_gradients,
    replicate,
    shard_parameters,
)
from diffusionpipe.passes.message_order import MessageOrder, message_order
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.planner.assembly.queued import are_waiting
from diffusionpipe.planner.pricing.meetings import Meeting, exchanges_of
from diffusionpipe.schedules import generator_of
from diffusionpipe.schedules.several.probes import with_probes
from diffusionpipe.timing import Graph, Streams, Times, graph_of, machine_of, times_of
from diffusionpipe.timing.held import changes_of
from diffusionpipe.timing.queues import QueuedTransfer, Queues
from diffusionpipe.timing.work import Transfer
from diffusionpipe.units import Seconds

NUM_ORDERS = 2
"""The number of orders of messages whose graphs a structure keeps."""

Pair = tuple[tuple[int, int], bool]
"""((block that writes, block that reads), whether a gradient comes back)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """One trained stage, after buckets and replicas: its worker, its block and its samples."""

    unit: int
    """The worker, replicas counted."""
    block: int
    """The number of its block, after buckets."""
    samples: int
    """Samples of every micro-batch."""
    microbatches: int
    forwards: int
    """The forwards of its block on its worker in an iteration, a probe's forwards included."""
    is_probe: bool
    """Whether it belongs to a probe, which runs forwards without gradients."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A schedule with its graph, made once so that it can be timed again and again with other cuts of the model."""

    schedule: Schedule
    """The schedule with reductions or gathers, without messages. Its tensors are named by `ahead` and `back`, frozen
    ones by their own names."""
    graph: Graph
    places: tuple[StagePlace, ...]
    holders: tuple[tuple[int, ...], ...]
    """The units (workers) that hold each block, by block."""
    meetings: tuple[Meeting, ...]
    """The edges over which different workers exchange tensors, as `exchanges_of` gives them."""

    @cached_property
    def order(self) -> MessageOrder:
        """The rules that put the schedule's messages in order by times; they are the same for any times."""
        return message_order(self.schedule, self.graph)

    @cached_property
    def queues(self) -> Queues:
        """The graph, prepared so that graphs with its messages in an order are made quickly."""
        return Queues.of(self.graph, computes=self.order.computes, hops=_hops(self.schedule, self.order))

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(source, destination) of all pairs of workers between which messages are sent."""
        works = self.graph.works
        return frozenset((work.source, work.destination) for work in works if isinstance(work, Transfer))

    def unqueued(self, costs: Costs) -> Times:
        """The times of the schedule's events at these costs if no message waits for another, as in `simulate`."""
        return times_of(self.graph, costs)

    def queued(self, costs: Costs, times: Times) -> Times:
        """The times of the schedule's events with messages in queues, in the order that `times` of `unqueued` gives.

        If messages wait for each other, a second order is tried and the better one counts, as in the module `queued`.
        """
        if not self.pairs:
            return times
        found = self._in_order(costs, times.ends)
        if not are_waiting(found.makespan, times.makespan):
            return found
        ends = [0.0] * len(self.graph)
        for own, queued in zip(self.graph.events, found.graph.events, strict=True):
            # From the numbers of the graph with queues to the numbers of this one, which `order` ranks.
            for event, other in zip(own, queued, strict=True):
                ends[event] = found.ends[other]
        again = self._in_order(costs, ends)
        return again if again.makespan < found.makespan else found

    def _in_order(self, costs: Costs, ends: Sequence[Seconds]) -> Times:
        """The times of all events with messages in the order that `ends`, the end of each event, gives."""
        return times_of(self._graph_in_order(tuple(self.order.ranks(ends))), costs)

    @cached_property
    def _graph_in_order(self) -> Callable[[tuple[int, ...]], Graph]:
        """A function from the ranks of events to the graph whose messages are in that order.

        It keeps its last graphs, because other cuts often have the same order.
        """

        def made(rank: tuple[int, ...]) -> Graph:
            computes = sorted(self.order.computes, key=rank.__getitem__)
            return self.queues.graph(computes, self.order.placed(rank))

        return lru_cache(maxsize=NUM_ORDERS)(made)


def ahead(producer: int, consumer: int) -> str:
    """The name, "P>C", of the tensors that block `producer` sends to block `consumer`."""
    return f"{producer}>{consumer}"


def back(producer: int, consumer: int) -> str:
    """The name, "P<C", of the gradients that return from block `consumer` to block `producer`."""
    return f"{producer}<{consumer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The stages of each worker of a family's schedule, and the most micro-batches whose tensors they hold at a time.

    Stages are counted before buckets and replicas.
    """

    blocks: tuple[tuple[tuple[int, int], ...], ...]
    """The stages that each worker runs, as (block, micro-batches), by worker."""
    parts: tuple[int, ...]
    """The number of micro-batches into which a block's backbone cuts a group's samples, by block."""
    peaks: tuple[tuple[tuple[int, ...], ...], ...]
    """Two numbers for each stage of a worker: how many micro-batches' activations it holds, and of how many it holds
    the tensors for W. They are given for each moment that may be the worker's maximum, by worker."""


@lru_cache(maxsize=256)
def generated(name: str, num_workers: int, num_microbatches: int, microbatch_size: int) -> Schedule:
    """The compute-only schedule of the family with this name at these sizes.

    The last ones are kept, because layouts and searches ask for the same ones again.

    Raises:
        ConfigError: there is no such family, or it cannot do these sizes.
    """
    return generator_of(name)(num_workers, num_microbatches, microbatch_size)


def microbatches_of_blocks(schedule: Schedule) -> dict[int, int]:
    """Block, ascending -> the number of micro-batches of all pipelines that train it, added up."""
    counts: Counter[int] = Counter()
    for pipeline in schedule.placement.pipelines:
        for weights in {schedule.placement.stages[stage].weights for stage in pipeline.stages}:
            counts[weights] += len(pipeline.microbatches)
    return dict(sorted(counts.items()))


def holding_of(schedule: Schedule) -> Holding:
    """The stages of each worker and the most micro-batches whose tensors they hold, by the worker's order of actions.

    Activations are held from F to B, or to I where backwards are split; then the tensors for W are held until W.
    """
    placement = schedule.placement
    count = {stage: len(p.microbatches) for p in placement.pipelines for stage in p.stages}
    own = [[s for s, stage in enumerate(placement.stages) if stage.worker == w] for w in range(schedule.num_workers)]
    return Holding(
        blocks=tuple(tuple((placement.stages[s].weights, count[s]) for s in stages) for stages in own),
        parts=tuple(microbatches_of_blocks(schedule).values()),
        peaks=tuple(_peaks(schedule, worker, stages) for worker, stages in enumerate(own)),
    )


def _peaks(schedule: Schedule, worker: int, stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    held = [0] * (2 * len(stages))
    # Of a stage and op: the places in `held` that change, one after the other, each with by how much.
    steps: dict[tuple[int, Op], tuple[tuple[int, int], ...]] = {}
    for place, stage in zip(range(0, len(held), 2), stages, strict=True):
        ops = schedule.placement.pipeline_of(stage).ops
        last = place + 1 if Op.W in ops else place
        for op, (taken, given_back) in changes_of(ops, 1, 1).items():
            steps[stage, op] = ((place, taken), (last, given_back))
        if Op.W in ops:  # what W needs is there when the rest is given back, and what both hold counts once
            steps[stage, Op.I] = ((place, -1), (place + 1, 1))
    seen: dict[tuple[int, ...], None] = {}
    is_rising = False
    for action in schedule.orders[worker]:
        for place, change in steps.get((action.stage, action.op), ()):
            if change < 0 and is_rising:  # before something is given back, and only there, can be a maximum
                seen[tuple(held)] = None
                is_rising = False
            held[place] += change
            is_rising |= change > 0
    # A moment at which no stage holds more than at another one cannot be the fullest, however large the stages are.
    return tuple(one for one in seen if not any(other != one and _covers(other, one) for other in seen))


def _covers(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(first, second, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The replicas, buckets and copies into which a schedule's stages are divided, and how copies are sharded."""

    replicas: tuple[int, ...]
    buckets: int
    data_parallel: int
    sharded: Sharded
    probes: tuple[tuple[str, Fraction], ...] = ()
    """Backbones that read their own estimate, and the share of their samples that does."""


def connected(schedule: Schedule, edges: Sequence[Edge], division: Division) -> Schedule:
    """The schedule of a generator after its probes, buckets, edges between blocks and replicas were added."""
    schedule = with_probes(schedule, dict(division.probes))
    schedule = subdivide(schedule, division.buckets, is_breadth_first=division.sharded is Sharded.ALL)
    schedule = connect_blocks(schedule, edges)
    if max(division.replicas) == 1:
        return schedule
    of_stage = [division.replicas[stage.worker] for stage in schedule.placement.stages]
    return replicate(schedule, of_stage, division.replicas)


def reduced(schedule: Schedule, division: Division) -> Schedule:
    """The schedule with the actions that the division needs: sums of gradients and, for sharded blocks, gathers."""
    if division.sharded is Sharded.ALL:
        return shard_parameters(schedule)
    if all(pipeline.ops == {Op.F} for pipeline in schedule.placement.pipelines):
        return schedule
    schedule = reduce_gradients(schedule, division.data_parallel > 1)
    return bring_parameters(schedule) if division.sharded is Sharded.OPTIMIZER else schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The frozen work before an iteration: the blocks that read its outputs, and how many samples run at a time."""

    outputs: tuple[tuple[str, ...], ...]
    """The frozen tensors that each trained block reads, by block."""
    runs: tuple[tuple[Range, int], ...]
    """(range of layers of the frozen block, samples that go through them at a time), in order."""
    max_chunk: int
    """The samples that go through at a time if there are no frozen layers."""


def encoded(schedule: Schedule, encoding: Encoding) -> Schedule:
    """The schedule that runs the frozen work of its batch before its first forward."""
    schedule = insert_encoding(
        schedule,
        block=len(encoding.outputs),
        outputs=dict(enumerate(encoding.outputs)),
        num_layers=max((layers.stop for layers, _ in encoding.runs), default=0),
        max_chunk=encoding.max_chunk,
        runs=encoding.runs,
    )
    return gathers_first(schedule)


def structure_of(
    schedule: Schedule, division: Division, pairs: tuple[Pair, ...], encoding: Encoding | None = None
) -> Structure:
    """The structure (schedule, graph, stages, holders) of a schedule whose blocks exchange tensors as `pairs` say.

    `pairs` are of blocks after buckets. With an encoding the frozen work runs before the first forward; without one
    there is no frozen work.
    """
    edges = [
        Edge(producer=a, consumer=b, tensors=(ahead(a, b),), gradients=(back(a, b),) if has_gradient else ())
        for (a, b), has_gradient in pairs
    ]
    schedule = reduced(connected(schedule, edges, division), division)
    # Taken before encoder stages are added, which hold no trained block.
    trained, of_stage = schedule.placement, schedule.placement.pipeline_of
    schedule = encoded(schedule, encoding) if encoding else schedule
    holders: dict[int, set[int]] = {}
    for stage in trained.stages:
        holders.setdefault(stage.weights, set()).add(stage.worker)
    return Structure(
        schedule=schedule,
        graph=graph_of(schedule),
        places=tuple(
            StagePlace(
                unit=stage.worker,
                block=stage.weights,
                samples=len(stage.share.samples(max(of_stage(s).microbatches))),
                microbatches=len(of_stage(s).numbers),
                forwards=trained.num_forwards(s),
                is_probe=of_stage(s).is_probe,
            )
            for s, stage in enumerate(trained.stages)
        ),
        holders=tuple(tuple(sorted(holders[block])) for block in sorted(holders)),
        meetings=exchanges_of(trained),
    )


def _hops(schedule: Schedule, order: MessageOrder) -> list[QueuedTransfer]:
    """All transfers of the schedule, each with the queues that `simulate` gives it at both of its ends."""
    machine, numbers = machine_of(Streams.DIRECTION), dict[tuple[int, Hashable], int]()
    stages, known = schedule.placement.stages, dict[tuple[int, int, bool], tuple[int, int]]()
    hops = []
    for index, events in enumerate(order.transfers):
        message = order.message(index)
        hosts = stages[message.source].worker, stages[message.destination].worker
        key = *hosts, message.is_gradient
        if key not in known:
            # A queue depends on the two ends and the direction alone, so one message of its kind is enough to ask the
            # machine.
            explicit = replace(schedule, messages=(message,))
            both = zip(hosts, ends(message, 0), strict=True)
            here, there = (numbers.setdefault((w, machine(explicit, w, action)), len(numbers)) for w, action in both)
            known[key] = here, there
        work = Transfer(*hosts, message.tensors, len(message.samples))
        hops.append(QueuedTransfer(events=events, work=work, hosts=hosts, queues=known[key]))
    return hops

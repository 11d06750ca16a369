"""What a candidate's schedule fixes before any time is known: who waits for whom, and who holds what."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Edge, Op, Schedule
from diffusionpipe.ir.flows import ends
from diffusionpipe.passes import connect_blocks, reduce_gradients, replicate, shard_parameters
from diffusionpipe.passes.message_order import MessageOrder, message_order
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.planner.pricing.stage_costs import Meeting, meetings_of
from diffusionpipe.schedules import generator_of
from diffusionpipe.timing import Graph, Streams, Times, graph_of, machine_of, prices_of, timed
from diffusionpipe.timing.held import changes_by_order
from diffusionpipe.timing.queues import Hop, Queues
from diffusionpipe.timing.work import Transfer

Pair = tuple[tuple[int, int], bool]
"""(block that writes, block that reads), and whether a gradient comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One stage, after buckets and replicas."""

    unit: int
    block: int
    samples: int
    """Of every micro-batch."""
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A schedule made ready to be timed again and again with other cuts of the model."""

    schedule: Schedule
    """With reductions or gathers, without messages. Its tensors are named by `ahead` and `back`."""
    graph: Graph
    order: MessageOrder
    queues: Queues
    places: tuple[Place, ...]
    holders: tuple[tuple[int, ...], ...]
    """Block by block the units that hold it."""
    meetings: tuple[Meeting, ...]
    pairs: frozenset[tuple[int, int]]
    """Workers between which something is sent."""

    def timed(self, costs: Costs) -> Times:
        """What `simulate` says of the schedule after `communicate`, both at these costs."""
        prices = prices_of(self.graph.works, costs)
        times = timed(self.graph, prices, waking=costs.waking)
        if not self.order.messages:
            return times
        rank = self.order.ranks(times.ends)
        computes = sorted(self.order.computes, key=rank.__getitem__)
        queued = self.queues.graph(computes, self.order.placed(rank))
        return timed(queued, prices, waking=costs.waking)


def ahead(producer: int, consumer: int) -> str:
    """The name of the tensors that one block sends to another."""
    return f"{producer}>{consumer}"


def back(producer: int, consumer: int) -> str:
    """And the gradients that come back."""
    return f"{producer}<{consumer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the workers of a family's schedule hold, before buckets and replicas."""

    blocks: tuple[tuple[tuple[int, int], ...], ...]
    """For each worker its stages: (block, micro-batches)."""
    peaks: tuple[tuple[tuple[int, ...], ...], ...]
    """For each worker: of how many micro-batches each of its stages holds activations, whenever that is a maximum."""


@lru_cache(maxsize=256)
def generated(name: str, num_workers: int, num_microbatches: int, microbatch_size: int) -> Schedule:
    """The family's schedule; made once, because a layout and a search ask for it again and again.

    Raises:
        ConfigError: there is no such family, or it cannot do these sizes.
    """
    return generator_of(name)(num_workers, num_microbatches, microbatch_size)


def holding_of(schedule: Schedule) -> Holding:
    """What the workers hold. An activation is held from its F to the end of B, or of W where the backward is split."""
    placement = schedule.placement
    count = {stage: len(p.microbatches) for p in placement.pipelines for stage in p.stages}
    own = [[s for s, stage in enumerate(placement.stages) if stage.worker == w] for w in range(schedule.num_workers)]
    return Holding(
        blocks=tuple(tuple((placement.stages[s].weights, count[s]) for s in stages) for stages in own),
        peaks=tuple(_peaks(schedule, worker, stages) for worker, stages in enumerate(own)),
    )


def _peaks(schedule: Schedule, worker: int, stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    held = dict.fromkeys(stages, 0)
    seen: dict[tuple[int, ...], None] = {}
    changes = changes_by_order(schedule, [(1, 1)] * len(schedule.placement.stages))[worker]
    for action, (taken, given_back) in zip(schedule.orders[worker], changes, strict=True):
        if taken:
            held[action.stage] += taken
            seen[tuple(held.values())] = None
        if given_back:
            held[action.stage] += given_back
    return tuple(one for one in seen if not any(other != one and _covers(other, one) for other in seen))


def _covers(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(first, second, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a schedule's stages are divided further, and what is summed or gathered then."""

    replicas: tuple[int, ...]
    buckets: int
    data_parallel: int
    sharded: bool


def connected(schedule: Schedule, edges: Sequence[Edge], division: Division) -> Schedule:
    """A generator's schedule with its stages in buckets, edges between blocks, and replicas."""
    schedule = subdivide(schedule, division.buckets, is_breadth_first=division.sharded)
    schedule = connect_blocks(schedule, edges)
    if max(division.replicas) == 1:
        return schedule
    return replicate(schedule, [division.replicas[stage.worker] for stage in schedule.placement.stages])


def reduced(schedule: Schedule, division: Division) -> Schedule:
    """A connected schedule with the collectives of its gradients and parameters."""
    if division.sharded:
        return shard_parameters(schedule)
    trains = any(pipeline.ops != {Op.F} for pipeline in schedule.placement.pipelines)
    return reduce_gradients(schedule, division.data_parallel > 1) if trains else schedule


def structure_of(schedule: Schedule, division: Division, pairs: tuple[Pair, ...]) -> Structure:
    """The structure of a schedule whose blocks, cut into buckets, exchange tensors as `pairs` say."""
    edges = [
        Edge(producer=a, consumer=b, tensors=(ahead(a, b),), gradients=(back(a, b),) if has_gradient else ())
        for (a, b), has_gradient in pairs
    ]
    schedule = reduced(connected(schedule, edges, division), division)
    placement, graph = schedule.placement, graph_of(schedule)
    order = message_order(schedule, graph)
    count = {stage: p.microbatches for p in placement.pipelines for stage in p.stages}
    hops = _hops(schedule, graph, order)
    holders: dict[int, set[int]] = {}
    for stage in placement.stages:
        holders.setdefault(stage.weights, set()).add(stage.worker)
    return Structure(
        schedule=schedule,
        graph=graph,
        order=order,
        queues=Queues.of(graph, computes=order.computes, hops=hops),
        places=tuple(
            Place(
                unit=stage.worker,
                block=stage.weights,
                samples=len(stage.share.samples(max(count[s]))),
                microbatches=len(count[s]),
            )
            for s, stage in enumerate(placement.stages)
        ),
        holders=tuple(tuple(sorted(holders[block])) for block in sorted(holders)),
        meetings=meetings_of(placement),
        pairs=frozenset(hop.hosts for hop in hops),
    )


def _hops(schedule: Schedule, graph: Graph, order: MessageOrder) -> list[Hop]:
    """The events of the messages, with the queues that the machine of `simulate` gives them."""
    machine, numbers = machine_of(Streams.DIRECTION), dict[tuple[int, Hashable], int]()
    explicit, stages = replace(schedule, messages=order.messages), schedule.placement.stages
    events = _transfers_into(graph)
    hops = []
    for slot, message in enumerate(order.messages):
        workers = stages[message.source].worker, stages[message.destination].worker
        here, there = (
            numbers.setdefault((worker, machine(explicit, worker, action)), len(numbers))
            for worker, action in zip(workers, ends(message, slot), strict=True)
        )
        hops.append(
            Hop(event=events[order.bounds[slot][0], order.readers[slot]].pop(), hosts=workers, queues=(here, there))
        )
    return hops


def _transfers_into(graph: Graph) -> dict[tuple[int, int], list[int]]:
    """(event that produces it, event that reads it) -> the transfers between them."""
    is_transfer = [isinstance(work, Transfer) for work in graph.works]
    found: dict[tuple[int, int], list[int]] = {}
    brought: dict[int, tuple[int, ...]] = {}  # of transfers and of events at which they meet
    for event in range(1, len(graph)):
        one, other = graph.first[event], graph.second[event]
        if is_transfer[graph.work[event]]:
            brought[event] = (event,)
            continue
        transfers = brought.get(one, ()) + brought.get(other, ())
        if transfers and not (graph.work[event] or graph.is_on_host[event]):
            brought[event] = transfers
            continue
        for transfer in transfers:
            found.setdefault((graph.first[transfer], event), []).append(transfer)
    return found

"""What a candidate's schedule fixes before any time is known: who waits for whom, and who holds what."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from diffusionpipe.ir import Edge, Schedule
from diffusionpipe.passes import connect_blocks, reduce_gradients, replicate
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.planner.assembly.compiled import Compiled, compiled
from diffusionpipe.schedules import generator_of
from diffusionpipe.timing.held import changes_by_order

Pair = tuple[tuple[int, int], bool]
"""(block that writes, block that reads), and whether a gradient comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One stage, after buckets and replicas."""

    unit: int
    block: int
    part: float
    """Of the samples of every micro-batch."""
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A schedule made ready to be timed again and again with other cuts of the model."""

    compiled: Compiled
    places: tuple[Place, ...]
    holders: tuple[tuple[int, ...], ...]
    """Block by block the units that hold it."""
    meetings: tuple[tuple[int, int, float], ...]
    """For each edge of `compiled`: producing stage, consuming stage, and the part of a micro-batch that they share."""


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


def structure_of(
    schedule: Schedule, replicas: tuple[int, ...], buckets: int, pairs: tuple[Pair, ...], is_data_parallel: bool
) -> Structure:
    """The structure of a family's schedule whose blocks, cut into buckets, exchange tensors as `pairs` say."""
    edges = [
        Edge(producer=a, consumer=b, tensors=("x",), gradients=("x",) if has_gradient else ())
        for (a, b), has_gradient in pairs
    ]
    schedule = connect_blocks(subdivide(schedule, buckets), edges)
    if max(replicas) > 1:
        schedule = replicate(schedule, [replicas[stage.worker] for stage in schedule.placement.stages])
    final = compiled(reduce_gradients(schedule, is_data_parallel))
    placement = schedule.placement
    count = {stage: len(p.microbatches) for p in placement.pipelines for stage in p.stages}
    shares = [stage.share for stage in placement.stages]
    holders: dict[int, set[int]] = {}
    for stage in placement.stages:
        holders.setdefault(stage.weights, set()).add(stage.worker)
    return Structure(
        compiled=final,
        places=tuple(
            Place(
                unit=stage.worker,
                block=stage.weights,
                part=float(stage.share.stop - stage.share.start),
                microbatches=count[s],
            )
            for s, stage in enumerate(placement.stages)
        ),
        holders=tuple(tuple(sorted(holders[block])) for block in sorted(holders)),
        meetings=tuple(
            (a, b, max(0.0, float(min(shares[a].stop, shares[b].stop) - max(shares[a].start, shares[b].start))))
            for a, b in final.edges
        ),
    )

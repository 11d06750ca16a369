"""Adds chains of stages with any numbers of replicas to the search: those with which 1F1B may be fastest.

A model whose parameters lie in a few layers is slow as a chain and as copies, and fast as copies before a chain. Where
links are slow, stages that compute longer but send less win. So every place is asked for all replicas at once, with an
objective that contains transfers and sums (`objectives.LeastOneForwardOneBackward`). For the cuts that matter it hardly
ever says more than 1F1B takes. So chains that are not faster than the best known by it are left out, and with them most
of the dynamic program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from diffusionpipe.costs.cluster import slow_links
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.encoders import host_sets
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import (
    BETTER,
    CHAIN,
    GAINED,
    GROWTH,
    HOPELESS,
    LEAST_RAMP,
    LOW_MEMORY_SCHEDULE,
    MAX_UNEQUAL_UNITS,
)
from diffusionpipe.planner.search.dynamic_program import Partition
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.pool import Judged, Pool
from diffusionpipe.planner.search.recut import recut
from diffusionpipe.schedules.traits import holds_one
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to run a chain: the ranks that encode, and whether it has one micro-batch under way at a time."""

    hosts: tuple[int, ...] | None
    """The units that encode; None for all."""
    is_lean: bool
    """Whether one micro-batch is under way at a time."""


def add_chains(
    pool: Pool,
    arrangement: Arrangement,
    microbatches: int,
    *,
    hosts: tuple[int, ...] | None = None,
    is_lean: bool = False,
) -> Judged | None:
    """Add chains of stages at a place that may beat the pool's best; return the best that fits, None without one.

    `hosts`: the units that encode; None for all. `is_lean`: with a schedule that has one micro-batch under way at a
    time, which holds least.
    """
    given = pool.judge.setting.given
    schedule = given.schedule or (LOW_MEMORY_SCHEDULE if is_lean else CHAIN)
    best: Judged | None = None
    way = _Way(hosts=hosts, is_lean=holds_one(schedule))
    for partition in _partitions(pool, arrangement, microbatches, way):
        # Partitions ascend by their values.
        if partition.value >= _limit(pool, arrangement, microbatches) * BETTER:
            break
        candidate = Candidate(
            arrangement=arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=partition.starts,
            replicas=partition.replicas,
            hosts=hosts,
            sharded=pool.judge.setting.sharded,
        )
        candidate = recut(pool.judge, candidate)
        is_whole = candidate.divides(pool.judge.setting.workload.batch)
        if candidate in pool.judged or not (is_whole and is_own(pool, arrangement, partition.replicas)):
            continue
        one = pool.judged_of(candidate)
        pool.add(one)
        if one.fits and (best is None or one.score < best.score):
            best = one
    return best


def is_own(pool: Pool, arrangement: Arrangement, replicas: tuple[int, ...]) -> bool:
    """Whether these replicas are looked at in this arrangement; False if an arrangement with more copies does the same.

    It does if the replicas have a common divisor and all devices and links are alike. Of copies the slowest device and
    link, and the least memory, count everywhere; replicas are priced each by itself, and share frozen work as they have
    time.
    """
    ground = pool.judge.tables.ground(arrangement)
    are_alike = len(set(zip(ground.speeds, ground.memories, strict=True))) == 1 and not slow_links(ground.cluster)
    return gcd(*replicas) == 1 or not are_alike


def add_lean_chains(pool: Pool, arrangement: Arrangement, microbatches: int) -> Judged | None:
    """Add chains that hold less memory to the pool; return the last one that is better and fits, else None.

    They run one micro-batch at a time, or keep encoders on some ranks alone. The place is skipped if no stage there was
    refused for its memory alone, or if its chains are too slow even without encoders.
    """
    given, memories = pool.judge.setting.given, pool.judge.tables.ground(arrangement).memories
    place = arrangement, microbatches
    if place not in pool.judge.questions.short:
        return None
    best = add_chains(pool, arrangement, microbatches, is_lean=True) if given.schedule is None else None
    # Some ranks encode for all where work is filled in, and where one micro-batch at a time was not enough.
    for is_lean in ((False, True) if given.schedule is None else (False,)) if pool.is_filled and best is None else ():
        # Those that do not fit where all encode may fit where some do.
        known = {
            (one.starts, one.replicas)
            for one, judged in pool.judged.items()
            if judged.fits and (one.arrangement, one.microbatches) == place
        }
        lighter = _partitions(pool, arrangement, microbatches, _Way(hosts=(), is_lean=is_lean))
        if any((one.starts, one.replicas) not in known for one in lighter):
            for hosts in host_sets(memories):
                best = add_chains(pool, arrangement, microbatches, hosts=hosts, is_lean=is_lean) or best
    return best


def _partitions(pool: Pool, arrangement: Arrangement, microbatches: int, way: _Way) -> tuple[Partition, ...]:
    """The dynamic program's partitions of the layers at a place, if their bound is below the pool's limit, best first.

    If the pool has no limit yet, limits grow until some partition is found.
    """
    replicas, limit = replicas_of(pool.judge, arrangement, microbatches), _limit(pool, arrangement, microbatches)

    def ask(most: Seconds) -> tuple[Partition, ...]:
        found = pool.judge.questions.chains(
            arrangement, microbatches, replicas=replicas, limit=most, hosts=way.hosts, is_lean=way.is_lean
        )
        # With one micro-batch under way at a time, the iteration takes each one's way in turn.
        return tuple(replace(one, value=one.value * (microbatches if way.is_lean else 1)) for one in found)

    if not replicas or arrangement.units == 1 or not pool.judge.footprint.may_fit(arrangement):
        return ()
    if limit < float("inf"):
        return ask(limit)
    # Nothing that fits is known yet. A low limit makes the program fast, so limits grow.
    for most in _growing(pool, arrangement, microbatches):
        if found := ask(most):
            return found
    return ask(limit)


def _growing(pool: Pool, arrangement: Arrangement, microbatches: int) -> Iterator[Seconds]:
    """Limits in seconds that grow from twice the time of devices that never wait to the time of one device alone."""
    tables = pool.judge.tables
    sums = tables.table.sums(tables.unit_samples(arrangement, microbatches), microbatches)
    alone = microbatches * (sums.forward[-1] + sums.backward[-1])
    most, speeds = GROWTH * alone / sum(tables.ground(arrangement).speeds), tables.ground(arrangement).speeds
    while most < GROWTH * alone / min(speeds):
        yield most
        most *= GROWTH


def _limit(pool: Pool, arrangement: Arrangement, microbatches: int) -> Seconds:
    """The limit of a chain's seconds as 1F1B, without frozen work, from which on chains at a place are left out.

    Other schedules may be faster than 1F1B, so the limit may be above the best time so far. With fewer micro-batches it
    is higher: 1F1B waits longer at both ends then, where a split backward hardly waits.
    """
    chain = pool.score if pool.chain_score == float("inf") else pool.chain_score
    ramp = arrangement.units - 1
    gained = (microbatches + ramp) / (microbatches + LEAST_RAMP * ramp)
    score = min(chain, min(max(GAINED, gained), HOPELESS) * pool.score)
    # Without fills frozen work comes first.
    return score - (0.0 if pool.is_filled else pool.judge.tables.frozen_seconds)


def replicas_of(judge: Judge, arrangement: Arrangement, microbatches: int) -> tuple[int, ...]:
    """The numbers of replicas of a stage that can share a micro-batch.

    Only 1 if stages are given, states are in parts or there are many units; () if there are then fewer layers than
    units.
    """
    given, units = judge.setting.given, arrangement.units
    if given.stages is not None or judge.setting.owners > 1 or units > MAX_UNEQUAL_UNITS:
        return (1,) if units <= judge.tables.num_layers else ()
    rows = judge.setting.workload.batch // (arrangement.data_parallel * microbatches)
    return tuple(r for r in range(1, units + 1) if rows % r == 0)

"""Makes candidates of data parallelism with parameters, gradients and optimizer state in parts.

They become plans like any other: gathers and reductions are in the orders, frozen work of the next batch fills waits,
and they are estimated in the same way. This module chooses how often gradients are accumulated, whether micro-batches
pass through the model one after the other or block by block, and how large a block is.
"""

from collections.abc import Iterator, Sequence

from diffusionpipe.holding.sharding import blocks_in_common
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.bounds import copies_may_fit
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import (
    BREADTH_FIRST,
    CLOSE,
    DEPTH_FIRST,
    MAX_MICROBATCHES,
    MAX_SHARDED_FORWARDS,
)
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.pool import Judged, Pool
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.schedules.traits import can_shard
from diffusionpipe.units import Seconds

Finalists = list[tuple[Candidate, Proposal]]


def with_sharded(
    setting: Setting,
    finalists: Sequence[tuple[Candidate, Proposal]],
    sharded: Finalists,
    *,
    limit: Seconds = float("inf"),
) -> Finalists:
    """The finalists of a search, and the sharded candidates that are faster than all of these and than `limit`.

    If `setting.given` demands sharded copies, only these are returned.
    """
    others = [] if setting.given.sharded is Sharded.ALL else list(finalists)
    fastest = min((proposal.step for _, proposal in others if proposal.overflow <= 0), default=limit)
    return [*others, *(pair for pair in sharded if pair[1].step < fastest)]


def sharded_finalists(setting: Setting, filler: Filler | None, *, fastest: Seconds = float("inf")) -> Finalists:
    """The fastest sharded candidate that fits in memory with its simulation, alone in a list; [] if there is none.

    Its step is below `fastest` seconds. All are estimated; then plans are made from the best estimate on, as long as
    another one could be faster.
    """
    pool = Pool(judge=Judge(setting=setting), is_filled=filler is not None)
    if pool.judge.has_ties and not setting.given.is_sharded:
        return []
    best: tuple[Candidate, Proposal] | None = None
    copies = Arrangement(units=1, data_parallel=setting.cluster.num_ranks)
    for bound, microbatches in sorted(_accumulations(pool.judge, is_filled=pool.is_filled)):
        if bound >= min(fastest, best[1].step if best else float("inf")):
            break
        if not copies_may_fit(pool.judge, copies, microbatches):
            continue
        for schedule in _schedules(setting, microbatches):
            found = _best_blocks(pool, microbatches, schedule, filler, min(fastest, best[1].step if best else fastest))
            if found and (best is None or found[1].step < best[1].step):
                best = found
    return [best] if best else []


def leanest_sharded(setting: Setting) -> tuple[Candidate, Proposal] | None:
    """(candidate, simulation) of the sharded candidate with the least memory, whether it fits or not.

    None if the batch cannot be cut, if copies may not be sharded, or if there are several backbones.
    """
    judge = Judge(setting=setting)
    if not setting.may_shard:
        return None
    if len(setting.graph.backbones) > 1:
        return None  # the search has looked at them
    num_layers = judge.tables.num_layers
    counts = [
        count for _, count in _accumulations(judge, is_filled=False) if count * num_layers <= MAX_SHARDED_FORWARDS
    ]
    schedules = _schedules(setting, 1)
    if not counts or not schedules:
        return None
    candidate = _sharded(judge, max(counts), schedules[0], num_layers)
    return candidate, propose(setting, candidate.layout(setting))


def _accumulations(judge: Judge, *, is_filled: bool) -> Iterator[tuple[Seconds, int]]:
    """(seconds of the compute alone, number of micro-batches) for each number into which copies can cut the batch."""
    setting, given = judge.setting, judge.setting.given
    ranks, batch = setting.cluster.num_ranks, setting.workload.batch
    if ranks == 1 or batch % ranks or not given.allows(units=1, data_parallel=ranks):
        return
    rows, slowest = batch // ranks, min(device.speed for device in setting.cluster.devices)
    frozen = judge.tables.frozen_seconds_ahead if is_filled else judge.tables.frozen_seconds
    for count in [given.microbatches] if given.microbatches else range(1, min(rows, MAX_MICROBATCHES) + 1):
        if rows % count == 0:
            sums = judge.tables.table.sums(rows / count)  # without casts, which are a part of gathering
            yield frozen + count * (sums.forward[-1] + sums.backward[-1]) / slowest, count


def _schedules(setting: Setting, microbatches: int) -> tuple[str, ...]:
    """The schedules that sharded copies may run: depth first and breadth first, or the given one.

    With one micro-batch both are the same, so only one is returned. () if the given schedule cannot shard.
    """
    given = setting.given.schedule
    if given is not None:
        return (given,) if can_shard(given) else ()
    return (DEPTH_FIRST, BREADTH_FIRST) if microbatches > 1 else (DEPTH_FIRST,)


def _best_blocks(
    pool: Pool, microbatches: int, schedule: str, filler: Filler | None, fastest: Seconds
) -> tuple[Candidate, Proposal] | None:
    """The fastest sharded candidate that fits with blocks of any size, with its simulation; None if there is none.

    Larger blocks take fewer gathers, smaller ones less memory. Candidates whose estimate is not below `fastest` are
    left out. If one does not fit, the one with the smallest blocks is next: if that does not fit, none does.
    """
    setting = pool.judge.setting
    best: tuple[Candidate, Proposal] | None = None
    left = _by_estimate(pool, microbatches, schedule)
    while left and left[0].score < fastest and (best is None or left[0].score * CLOSE < best[1].step):
        one = left.pop(0)
        proposal = propose(setting, one.candidate.layout(setting), filler)
        if proposal.overflow > 0:
            left = [other for other in left if other.candidate.buckets > one.candidate.buckets]
            left.sort(key=lambda other: -other.candidate.buckets)
        else:
            left.sort(key=_rank)
            if best is None or proposal.step < best[1].step:
                best = one.candidate, proposal
    return best


def _by_estimate(pool: Pool, microbatches: int, schedule: str) -> list[Judged]:
    judge = pool.judge
    counts = [n for n in numbers_of_blocks(judge.tables.num_layers) if n * microbatches <= MAX_SHARDED_FORWARDS]
    found = [_sharded(judge, microbatches, schedule, count) for count in counts]
    if judge.setting.given.sharded is not Sharded.ALL:  # else the plan says which parameter it is
        found = [candidate for candidate in found if not _in_common(judge, candidate)]
    return sorted(map(pool.judged_of, found), key=_rank)


def _in_common(judge: Judge, candidate: Candidate) -> bool:
    """Whether several blocks use one parameter, also a frozen one such as T5's relative positions."""
    graph, starts = judge.setting.graph, judge.tables.block_starts(candidate)
    spans = zip(starts, (*starts[1:], judge.tables.num_layers), strict=True)
    blocks = [graph.backbone_layers[first:stop] for first, stop in spans]
    return bool(blocks_in_common(graph, (*blocks, graph.frozen_layers)))


def _rank(one: Judged) -> tuple[Seconds, int]:
    """(score, number of blocks), by which candidates are sorted: of equal scores larger blocks have fewer waits."""
    return one.score, one.candidate.buckets


def _sharded(judge: Judge, microbatches: int, schedule: str, buckets: int) -> Candidate:
    return Candidate(
        arrangement=Arrangement(units=1, data_parallel=judge.setting.cluster.num_ranks),
        schedule=schedule,
        microbatches=microbatches,
        starts=(0,),
        replicas=(1,),
        buckets=buckets,
        sharded=Sharded.ALL,
    )


def numbers_of_blocks(num_layers: int) -> list[int]:
    """The numbers of blocks that are tried: one for each layer, halved again and again, down to four or fewer."""
    counts = [num_layers]
    while counts[-1] > 4:
        counts.append(counts[-1] // 2)
    return counts

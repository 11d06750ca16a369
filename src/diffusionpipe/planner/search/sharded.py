"""Data parallelism with parameters, gradients and optimizer state in parts, as a candidate for a plan.

A plan like any other: its gathers and reductions stand in its orders, frozen work of the next batch fills its waits,
and its time is the simulator's. What is chosen here is how often gradients are accumulated, whether its micro-batches
pass through the model one after the other or block by block, and how large a block is.
"""

from collections.abc import Iterator, Sequence

from diffusionpipe.planner.assembly.build import Filler
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.stage_costs import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.units import Seconds

MAX_MICROBATCHES = 128
MAX_FORWARDS = 2048
"""Blocks x micro-batches of what is tried."""
DEPTH_FIRST, BREADTH_FIRST = "1f1b", "gpipe"
"""What the orders are called with one stage: micro-batch by micro-batch, which holds the activations of one but gathers
every block for each; and all forwards first, block by block, which gathers a block twice in all."""
CLOSE = 1.0005
"""So many times the compute alone is not worth other blocks."""
WORSE = 1.001
"""Where larger blocks take so many times as long as smaller ones, even larger ones are not tried."""

Finalists = list[tuple[Candidate, Proposal]]


def with_sharded(
    setting: Setting,
    finalists: Sequence[tuple[Candidate, Proposal]],
    filler: Filler | None,
    *,
    limit: Seconds = float("inf"),
) -> Finalists:
    """The finalists of a search and the sharded ones, or what `setting.given` allows of them, faster than `limit`."""
    if setting.given.sharded is False:
        return list(finalists)
    others = [] if setting.given.sharded else list(finalists)
    fastest = min((proposal.step for _, proposal in others if proposal.overflow <= 0), default=limit)
    return [*others, *sharded_finalists(setting, filler, fastest=min(fastest, limit))]


def sharded_finalists(setting: Setting, filler: Filler | None, *, fastest: Seconds = float("inf")) -> Finalists:
    """The best sharded candidate that fits in memory; none where none does, or none can be faster than `fastest`."""
    judge = Judge(setting=setting)
    best: tuple[Candidate, Proposal] | None = None
    for bound, microbatches in sorted(_accumulations(judge)):
        if bound >= min(fastest, best[1].step if best else float("inf")):
            break
        for schedule in _schedules(setting, microbatches):
            found = _best_blocks(judge, microbatches, schedule, filler, bound)
            if found and (best is None or found[1].step < best[1].step):
                best = found
    return [best] if best else []


def leanest_sharded(setting: Setting) -> tuple[Candidate, Proposal] | None:
    """The sharded candidate with the least memory, whether it fits or not; None where the batch cannot be cut."""
    judge = Judge(setting=setting)
    if setting.given.sharded is False:
        return None
    counts = [count for _, count in _accumulations(judge) if count * judge.tables.num_layers <= MAX_FORWARDS]
    schedules = _schedules(setting, 1)
    if not counts or not schedules:
        return None
    candidate = _sharded(judge, max(counts), schedules[0], judge.tables.num_layers)
    return candidate, propose(setting, candidate.layout(setting))


def _accumulations(judge: Judge) -> Iterator[tuple[Seconds, int]]:
    """(time of the compute alone, micro-batches) wherever the batch can be cut."""
    setting, given = judge.setting, judge.setting.given
    ranks, batch = setting.cluster.num_ranks, setting.workload.batch
    if ranks == 1 or batch % ranks or not given.allows(units=1, data_parallel=ranks):
        return
    rows, slowest = batch // ranks, min(device.speed for device in setting.cluster.devices)
    for count in [given.microbatches] if given.microbatches else range(1, min(rows, MAX_MICROBATCHES) + 1):
        if rows % count == 0:
            sums = judge.tables.table.sums(rows / count)
            yield judge.tables.frozen_seconds + count * (sums.forward[-1] + sums.backward[-1]) / slowest, count


def _schedules(setting: Setting, microbatches: int) -> tuple[str, ...]:
    names = (DEPTH_FIRST, BREADTH_FIRST) if microbatches > 1 else (DEPTH_FIRST,)
    given = setting.given.schedule
    return names if given is None else tuple(name for name in (DEPTH_FIRST, BREADTH_FIRST) if name == given)


def _best_blocks(
    judge: Judge, microbatches: int, schedule: str, filler: Filler | None, bound: Seconds
) -> tuple[Candidate, Proposal] | None:
    """The fastest that fits with blocks of any size: larger ones take fewer gathers, smaller ones less memory."""
    setting = judge.setting
    best: tuple[Candidate, Proposal] | None = None
    for buckets in _numbers_of_blocks(judge.tables.num_layers):
        if buckets * microbatches > MAX_FORWARDS:
            continue
        candidate = _sharded(judge, microbatches, schedule, buckets)
        proposal = propose(setting, candidate.layout(setting), filler)
        if proposal.overflow > 0:
            break  # larger blocks do not fit either
        if best is not None and proposal.step > best[1].step * WORSE:
            break
        if best is None or proposal.step < best[1].step * (1 - 1e-9):
            best = candidate, proposal
        if best[1].step < bound * CLOSE:
            break
    return best


def _sharded(judge: Judge, microbatches: int, schedule: str, buckets: int) -> Candidate:
    return Candidate(
        arrangement=Arrangement(units=1, data_parallel=judge.setting.cluster.num_ranks),
        schedule=schedule,
        microbatches=microbatches,
        starts=(0,),
        replicas=(1,),
        buckets=buckets,
        sharded=True,
    )


def _numbers_of_blocks(num_layers: int) -> list[int]:
    """From a block for each layer to a few."""
    counts = [num_layers]
    while counts[-1] > 4:
        counts.append(counts[-1] // 2)
    return counts

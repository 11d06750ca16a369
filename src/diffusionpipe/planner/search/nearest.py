"""Finds the layout that lacks the least memory, if none fits: advice is measured against it.

Cuts that balance time may put most memory on one device, so cuts that balance memory are looked at too: for 1F1B, and
for one micro-batch at a time, which holds least.
"""

from collections import defaultdict
from collections.abc import Iterator

from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.cascades import roomy_pairs
from diffusionpipe.planner.search.constants import CHAIN, LOW_MEMORY_SCHEDULE
from diffusionpipe.planner.search.dynamic_program import Partition, best_partitions
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.objectives import CriticalPath, Fullest
from diffusionpipe.planner.search.placed import placed
from diffusionpipe.planner.search.places import places_of
from diffusionpipe.planner.search.pool import Judged, Pool
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.schedules.traits import holds_one


def least_overflow(setting: Setting) -> tuple[Candidate, Proposal] | None:
    """(candidate, simulation) of the layout that lacks the least memory; None if no layout cuts the batch.

    Pipelines and whole copies are looked at; two backbones only one after the other. If some layout fits, the overflow
    of the result is not above 0.
    """
    best = least_estimated_overflow(setting)
    return None if best is None else (best.candidate, propose(setting, best.candidate.layout(setting)))


def least_estimated_overflow(setting: Setting) -> Judged | None:
    """The candidate that lacks the least memory by its estimate; None if no layout cuts the batch.

    Nothing is simulated in full, so it takes a fraction of the time of `least_overflow`.
    """
    pool = Pool(judge=Judge(setting=setting), is_filled=False)
    if len(setting.graph.backbones) > 1:
        found = [pool.judged_of(candidate) for candidate in roomy_pairs(pool.judge)]
    else:
        found = [pool.judged_of(candidate) for candidate in dict.fromkeys(_lean(pool.judge))]
    return min(found, key=lambda one: (one.estimate.overflow, one.score), default=None)


def _lean(judge: Judge) -> Iterator[Candidate]:
    """The candidates for one backbone that may take least memory."""
    given = judge.setting.given
    counts: dict[Arrangement, list[int]] = defaultdict(list)
    for _, arrangement, microbatches in places_of(judge):
        counts[arrangement].append(microbatches)
        if not given.allows_chains:
            yield from placed(judge, arrangement, microbatches)
            continue
        partitions = judge.questions.partitions(
            arrangement, microbatches, CriticalPath(microbatches), width=2, ignores_memory=True
        )
        yield from _candidates(judge, arrangement, given.schedule or CHAIN, microbatches, partitions)
    if not given.allows_chains:
        return
    for arrangement, numbers in counts.items():
        microbatches = max(numbers)  # small ones hold least
        for schedule in (given.schedule,) if given.schedule else (CHAIN, LOW_MEMORY_SCHEDULE):
            in_flight = 1 if holds_one(schedule) else None
            question = judge.questions.room(arrangement, microbatches, in_flight=in_flight)
            partitions = best_partitions(question, Fullest(), width=1)
            yield from _candidates(judge, arrangement, schedule, microbatches, partitions)


def _candidates(
    judge: Judge, arrangement: Arrangement, schedule: str, microbatches: int, partitions: tuple[Partition, ...]
) -> Iterator[Candidate]:
    for partition in partitions:
        yield Candidate(
            arrangement=arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=partition.starts,
            replicas=partition.replicas,
            sharded=judge.setting.sharded,
        )

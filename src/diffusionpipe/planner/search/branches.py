"""Adds candidates to the search whose stages on different branches run at the same time.

`branch_program` cuts a model that is listed branch by branch (`branch_order`). The order is 1F1B over the graph of its
stages (`schedules/building/branches.py`). All else is as in a chain: a tensor always goes straight from the stage that
writes it to each that reads it.
"""

from collections.abc import Sequence

from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.search.branch_program import best_branches
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.chains import is_own, replicas_of
from diffusionpipe.planner.search.constants import WIDTH
from diffusionpipe.planner.search.pool import Pool
from diffusionpipe.planner.search.recut import recut
from diffusionpipe.schedules.building.branches import GRAPHPIPE


def add_branches(pool: Pool, places: Sequence[tuple[Arrangement, int]]) -> None:
    """Add candidates with stages on branches to the pool, at these (arrangement, micro-batches).

    It adds nothing if the model has no branches, or if another schedule is given.
    """
    judge = pool.judge
    if judge.tables.tree is None or judge.setting.given.schedule not in (None, GRAPHPIPE):
        return
    for arrangement, microbatches in places:
        replicas = replicas_of(judge, arrangement, microbatches)
        if arrangement.units == 1 or not replicas or not judge.footprint.may_fit(arrangement):
            continue
        # The dearest stage is busy all the time: whatever is to be better than the best has a cheaper one.
        cap = pool.score / microbatches
        question = judge.questions.question(arrangement, microbatches, replicas=replicas, cap=cap)
        for partition in best_branches(question, judge.tables.tree, microbatches, width=WIDTH):
            candidate = Candidate(
                arrangement=arrangement,
                schedule=GRAPHPIPE,
                microbatches=microbatches,
                starts=partition.starts,
                replicas=partition.replicas,
                sharded=judge.setting.sharded,
            )
            if candidate.divides(judge.setting.workload.batch) and is_own(pool, arrangement, partition.replicas):
                pool.add(pool.judged_of(recut(judge, candidate)))

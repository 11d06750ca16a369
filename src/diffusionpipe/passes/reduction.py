"""Gradient reductions, as early as they can start."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.timing import graph_of, timed
from diffusionpipe.timing.work import Compute, Encode, Work
from diffusionpipe.units import Seconds


def reduce_gradients(schedule: Schedule, is_data_parallel: bool) -> Schedule:
    """The schedule with a REDUCE_GRAD after the last backward of every block whose gradients must be summed.

        worker 1   F0 F1 B0 B1 REDUCE          stage 1 is done early: its reduction runs beside the other backwards
        worker 0   F0 F1 F2 B0 B1 B2 REDUCE

    These are the blocks that several stages hold, or all blocks under data parallelism around the pipeline. Where
    two stages of one worker hold the same block there is one reduction, after the last backward of either.

    A worker's reductions run one after the other, and each waits for all holders of its block. So all workers have them
    in one order, the order of the ends of the blocks' last backwards anywhere, where a forward takes one unit of time
    and a backward two. A block that a worker is done with early comes after those that are complete before it, which
    delays nothing. Without that, two workers could each wait for the other: in Chimera with an odd number of
    micro-batches the middle two finish the blocks that they share in opposite orders.

    Raises:
        ScheduleError: the schedule gets stuck.
    """
    stages = schedule.placement.stages
    holders: dict[int, int] = defaultdict(int)
    for pipeline in schedule.placement.pipelines:
        for stage in () if pipeline.is_probe else pipeline.stages:
            holders[stages[stage].weights] += 1
    last = [
        {stages[a.stage].weights: i for i, a in enumerate(order) if a.op in (Op.B, Op.W)} for order in schedule.orders
    ]
    if not is_data_parallel and max(holders.values(), default=0) < 2:
        return schedule
    complete = _complete(schedule, last)
    orders = []
    for order, index in zip(schedule.orders, last, strict=True):
        behind: dict[int, list[Action]] = defaultdict(list)
        position = 0
        for block in sorted(index, key=lambda block: (complete[block], block)):
            if is_data_parallel or holders[block] > 1:
                # Not before a block that is complete earlier: all workers have their reductions in one order.
                position = max(position, index[block])
                behind[position].append(Action(stage=order[index[block]].stage, op=Op.REDUCE_GRAD))
        orders.append(tuple(a for i, action in enumerate(order) for a in (action, *behind[i])))
    return replace(schedule, orders=tuple(orders))


def _units(work: Work) -> Seconds:
    """The time of an event's work for comparing ends: 2 for a whole backward, 1 for other computing, 0 for all else."""
    match work:
        case Compute(op=Op.B):
            return 2
        case Compute() | Encode():
            return 1
        case _:
            return 0


def _complete(schedule: Schedule, last: Sequence[Mapping[int, int]]) -> Mapping[int, Seconds]:
    """Block -> the time at which its last backward on any worker ends, by which blocks can be sorted.

    `last`: for each worker, block -> the place of the block's last backward in the worker's order. Where no two workers
    hold the same block, or each holds one, these places sort them as well, and are returned in place of times.
    """
    places = {block: place for index in last for block, place in index.items()}
    if len(places) == sum(map(len, last)) or not any(len(index) > 1 for index in last):
        return places
    graph = graph_of(schedule)
    ends = timed(graph, [_units(work) for work in graph.works]).ends
    complete: dict[int, Seconds] = defaultdict(int)
    for worker, index in enumerate(last):
        for block, i in index.items():
            complete[block] = max(complete[block], ends[graph.events[worker][i]])
    return complete

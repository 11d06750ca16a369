"""Probes: forwards without gradients ahead of a step, whose estimates its micro-batches read (self-conditioning).

The last micro-batches of a batch are conditioned. Their probes run first, and feed back to the first stage; meanwhile
the micro-batches before them begin. 1F1B with p = 2, m = 2, where the second micro-batch alone is conditioned:

    worker 0   2F1  0F0  0F1            0B0       0B1        2F1 is the probe of micro-batch 1 on stages 2 and 3
    worker 1        3F1       1F0  1B0       1F1  1B1        0F1 reads the estimate that 3F1 writes

After Chen, Zhang, Hinton, "Analog Bits", ICLR 2023, https://arxiv.org/abs/2208.04202, section 3.2. They draw for each
step whether all of it is conditioned; here a fixed share of every batch is, so that one order serves every step.

With p stages of equal times F, B and T of a probe, m micro-batches of which k are conditioned, and free communication:

    time                    m (F + B) + k T + (p - 1) (F + B): the work of the probes, and no bubble
                            as long as the first estimate is back in time: m - k + min(k, m) >= p, else its way counts
    activations in flight   as in the family: a probe keeps nothing for a backward
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from diffusionpipe.ir import Action, Op, Pipeline, Placement, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import FORWARD


def with_probes(schedule: Schedule, shares: Mapping[str, Fraction]) -> Schedule:
    """The schedule in which each worker first runs its probes, in new pipelines; without conditioned samples unchanged.

    `shares`: backbone -> the share of its samples that is conditioned, the last ones of the batch. A micro-batch that
    holds any of them is probed.

    >>> from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
    >>> for order in with_probes(one_f_one_b(2, 2), {"": Fraction(1, 2)}).orders:
    ...     print(*order)
    2F1 0F0 0F1 0B0 0B1
    3F1 1F0 1B0 1F1 1B1
    """
    placement = schedule.placement
    stages, found = list(placement.stages), list[Pipeline]()
    for pipeline in placement.pipelines:
        first = placement.first_conditioned(pipeline, shares.get(pipeline.model, Fraction(0)))
        if first < len(pipeline.microbatches):
            own = range(len(stages), len(stages) + len(pipeline.stages))
            number = dict(zip(pipeline.stages, own, strict=True))
            stages += [placement.stages[stage] for stage in pipeline.stages]
            edges = tuple(
                replace(edge, producer=number[edge.producer], consumer=number[edge.consumer], gradients=())
                for edge in pipeline.edges
            )
            found.append(replace(pipeline, stages=tuple(own), ops=FORWARD, edges=edges, probes_from=first))
    if not found:
        return schedule
    with_all = Placement(stages=tuple(stages), pipelines=(*placement.pipelines, *found))
    ahead = _orders(with_all, found, schedule.num_workers)
    orders = tuple((*probes, *order) for probes, order in zip(ahead, schedule.orders, strict=True))
    return replace(schedule, placement=with_all, orders=orders)


def _orders(placement: Placement, pipelines: Sequence[Pipeline], num_workers: int) -> list[list[Action]]:
    """The forwards of the probes on each worker, by worker.

    In each time slot a worker runs the forward that is furthest down its pipeline, of all that can start.
    """
    orders: list[list[Action]] = [[] for _ in range(num_workers)]
    # Each begins at the first conditioned micro-batch.
    done = {stage: pipeline.numbers.start for pipeline in pipelines for stage in pipeline.stages}
    while any(done[pipeline.stages[-1]] < pipeline.numbers.stop for pipeline in pipelines):
        taken: dict[int, tuple[int, int]] = {}
        for pipeline in pipelines:
            for place, stage in enumerate(pipeline.stages):
                # The first stage waits for nothing.
                ready = done[pipeline.stages[place - 1]] if place else pipeline.numbers.stop
                worker = placement.stages[stage].worker
                if done[stage] < ready and (worker not in taken or taken[worker][0] < place):
                    taken[worker] = place, stage
        for worker, (_, stage) in taken.items():
            orders[worker].append(compute_action(stage, Op.F, done[stage]))
            done[stage] += 1
    return orders

"""A window of an order that warms up with forwards and then alternates: 1F1B or kFkB without its flush.

A worker that runs w forwards ahead does, for ever, the forward of micro-batch k + w and the backward of micro-batch k,
counted over all batches. So in the window of a batch of m micro-batches, the forward next to backward k is the
forward of micro-batch (k + w) mod m of the batch that is (k + w) div m later [1]. Its STEP comes right after its last
gradient [2]. 1F1B with 3 workers runs 2, 1 and 0 forwards ahead:

>>> from diffusionpipe.schedules import one_f_one_b
>>> for order in without_flush(one_f_one_b(3, 2), (2, 1, 0)).orders:
...     print(*order)
0F0+1 0B0 0F1+1 0B1 0STEP
1F1 1B0 1F0+1 1B1 1STEP
2F0 2B0 2F1 2B1 2STEP

Where k forwards and k backwards take turns (kFkB), the same holds for groups of k micro-batches, and k divides m:

>>> from diffusionpipe.schedules.families.kfkb import kfkb
>>> for order in without_flush(kfkb(2, 4), (2, 0), 2).orders:
...     print(*order)
0F2 0F3 0B0 0B1 0F0+1 0F1+1 0B2 0B3 0STEP
1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1STEP

After Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2
(https://doi.org/10.1145/3341301.3359646); with more forwards ahead after Fan et al., "DAPPLE", PPoPP 2021, section 4;
with groups after Dutta et al., "TiMePReSt", 2024, https://arxiv.org/abs/2410.14312, whose nF1B runs several forwards of
a batch before its backwards.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.ir.action import Reading


def without_flush(flushed: Schedule, ahead: Sequence[int], turn: int = 1) -> Schedule:
    """The window, an order that repeats without a flush, of a compute-only schedule with one stage on each worker.

    Args:
        flushed: the schedule with a flush.
        ahead: the number of micro-batches by which each worker's forwards lead, by worker; multiples of `turn`.
        turn: the number of forwards that run one after the other before as many backwards; divides the micro-batches.
    """
    orders = []
    for order, lead in zip(flushed.orders, ahead, strict=True):
        stage = order[0].stage
        count = len(flushed.placement.pipeline_of(stage).microbatches)
        window: list[Action] = []
        for first in range(0, count, turn):
            for microbatch in range(first, first + turn):
                batch, other = divmod(microbatch + lead, count)  # [1]
                window.append(replace(compute_action(stage, Op.F, other), reading=Reading(lead=batch)))
            window += (compute_action(stage, Op.B, microbatch) for microbatch in range(first, first + turn))
        window += (action for action in order if action.op is Op.REDUCE_GRAD)
        orders.append((*window, Action(stage=stage, op=Op.STEP)))  # [2]
    return replace(flushed, orders=tuple(orders))


def turn_of(window: Schedule) -> int:
    """The number of forwards that a window's first worker runs before each group of as many backwards."""
    ops = [action.op for action in window.orders[0] if action.op in (Op.F, Op.B)]
    return ops.index(Op.B)

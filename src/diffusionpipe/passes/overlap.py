"""A window of an order that warms up with forwards and then alternates: 1F1B without its flush.

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

After Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2
(https://doi.org/10.1145/3341301.3359646); with more forwards ahead after Fan et al., "DAPPLE", PPoPP 2021, section 4.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.ir.action import Reading


def without_flush(flushed: Schedule, ahead: Sequence[int]) -> Schedule:
    """The window of a compute-only schedule with one stage for each worker; `ahead` says by how much each one leads."""
    orders = []
    for order, lead in zip(flushed.orders, ahead, strict=True):
        stage = order[0].stage
        count = len(flushed.placement.pipeline_of(stage).microbatches)
        window: list[Action] = []
        for microbatch in range(count):
            batch, other = divmod(microbatch + lead, count)  # [1]
            window.append(replace(compute_action(stage, Op.F, other), reading=Reading(lead=batch)))
            window.append(compute_action(stage, Op.B, microbatch))
        window += (action for action in order if action.op is Op.REDUCE_GRAD)
        orders.append((*window, Action(stage=stage, op=Op.STEP)))  # [2]
    return replace(flushed, orders=tuple(orders))

"""V-Min: a third of the activation memory of 1F1B, and a smaller bubble where F, I and W take equal times."""

from collections.abc import Sequence
from functools import partial

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.building_block import repeated, v_block, v_schedule
from diffusionpipe.schedules.building.shapes import require_positive
from diffusionpipe.schedules.building.split_work import UNIT_COSTS
from diffusionpipe.units import Seconds


def v_min(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
) -> Schedule:
    """The V-Min schedule: its block has one slot between neighbouring workers, down and up the V and back, no pause.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362. Each
    worker has two stages of a V. Worker i of p runs, counted in slots, F of stage i at i, F of stage 2p - 1 - i at 2p -
    1 - i, their I at 4p - 1 + d - i and 2p + d + i, and each W in the first free slot after its I. If 3 divides p, d =
    2, so that nothing collides. The block repeats every 6 slots. It is squeezed (`squeeze`) with the given costs, one
    for all stages or one for each, within the memory of the repeated block. Except for d a micro-batch never pauses, so
    no lifespan can be shorter. But the block has no slack for unequal times: with them the bubble can be larger than
    that of 1F1B.

    With F = I = W = 1 on each of the 2p stages, free communication and m >= p micro-batches:

        time                    6m + 4p - 5 or less; 1F1B has 6m + 6 (p - 1)
        activations in flight   2 ceil((p - 1) / 3) + 2 stages on a worker; 1F1B has 2p

    Time runs to the right; p = 4, m = 2. Stages 0 and 7 are on worker 0:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> from diffusionpipe.viz.sketch import sketch
    >>> schedule = v_min(4, 2)
    >>> print(sketch(simulate(schedule, uniform_costs(schedule))))
    0 | 0F0 0F1 .   .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 .   .   0I0 0W0 0I1 0W1
    1 | .   1F0 1F1 .   .   .   6F0 .   6F1 6I0 .   6I1 6W0 .   1I0 6W1 1I1 1W0 1W1
    2 | .   .   2F0 2F1 .   5F0 .   5F1 .   .   5I0 .   5I1 2I0 5W0 2I1 2W0 5W1 2W1
    3 | .   .   .   3F0 4F0 3F1 4F1 .   .   .   .   4I0 3I0 4I1 3I1 4W0 3W0 4W1 3W1

    Raises:
        ConfigError: a size is below 1, or there are costs for another number of stages.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    block = v_block(num_workers, hops=(1, 1, 1, 1), waits=(0, 2 if num_workers % 3 == 0 else 0, 0))
    return v_schedule(
        "v-min", partial(repeated, block), num_microbatches, microbatch_size, costs=costs, latency=latency
    )

"""V-Half: half the activation memory of 1F1B, and a smaller bubble."""

from collections.abc import Sequence
from functools import partial

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.building_block import repeated, v_block, v_schedule
from diffusionpipe.schedules.building.shapes import require_positive
from diffusionpipe.schedules.building.split_work import UNIT_COSTS
from diffusionpipe.units import Seconds


def v_half(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
) -> Schedule:
    """The V-Half schedule: its block has two slots between neighbouring workers on the way down, one on the way up.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362. Each
    worker has two stages of a V. Worker i of p runs, counted in slots, F of stage i at 2i, F of stage 2p - 1 - i at 3p
    - 2 - i, their I at 6p - 2 + d - i and 3p - 1 + d + 2i, and each W in the first free slot after its I. If p is even,
    d = 3, so that nothing collides. The block repeats every 6 slots. It is squeezed (`squeeze`) with the given costs,
    one for all stages or one for each, within the memory of the repeated block.

    With F = I = W = 1 on each of the 2p stages, free communication and m >= p micro-batches:

        time                    6m + 3p - 7 for even p > 2, 6m + 3p - 4 for odd p > 1; 1F1B has 6m + 6 (p - 1)
        activations in flight   p + 2 stages on a worker for even p, p + 1 for odd p; 1F1B has 2p

    Time runs to the right; p = 4, m = 3. Stages 0 and 7 are on worker 0:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> from diffusionpipe.viz.sketch import sketch
    >>> schedule = v_half(4, 3)
    >>> print(sketch(simulate(schedule, uniform_costs(schedule))))
    0 | 0F0 0F1 0F2 .   .   .   .   7F0 7I0 7F1 7I1 7W0 7F2 7I2 7W1 7W2 0I0 0W0 .   0I1 0W1 0I2 0W2
    1 | .   1F0 1F1 1F2 .   .   6F0 .   6F1 6I0 6F2 6I1 6W0 6W1 6I2 1I0 1W0 .   1I1 6W2 1I2 1W1 1W2
    2 | .   .   2F0 2F1 .   5F0 2F2 5F1 .   5F2 5I0 5W0 5I1 .   2I0 2W0 5I2 2I1 5W1 2I2 2W1 5W2 2W2
    3 | .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4I0 4W0 3I0 3W0 4I1 3I1 4I2 3I2 4W1 3W1 4W2 3W2

    Raises:
        ConfigError: a size is below 1, or there are costs for another number of stages.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    block = v_block(num_workers, hops=(2, 1, 2, 1), waits=(0, 3 if num_workers % 2 == 0 else 0, 1))
    return v_schedule(
        "v-half", partial(repeated, block), num_microbatches, microbatch_size, costs=costs, latency=latency
    )

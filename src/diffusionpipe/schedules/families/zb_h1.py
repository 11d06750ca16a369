"""ZB-H1: 1F1B whose weight gradients wait for the time in which the pipeline runs empty."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import SPLIT, chain, require_positive
from diffusionpipe.schedules.building.weight_gradient_delay import delayed


def zb_h1(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Stage s warms up as in 1F1B, and runs a micro-batch's W together with the I of the s-th micro-batch after it.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 2. A stage sends
    the gradient of its inputs (I; the paper writes B) to the previous stage without waiting for W. At the end every
    worker still has W to run while the last I arrive. All W are delayed until memory is as full as that of the first
    worker in 1F1B.

    With p stages of equal times F, I and W, m >= p micro-batches, W <= F, W <= I, and free communication:

        time                    m (F + I + W) + (p - 1) (F + I - W)
        bubble                  (p - 1) (F + I - W) of it; a third of 1F1B's if F = I = W
        activations in flight   min(p, m) on every worker, on the worker of stage s at most p - s before I,
                                s between I and W

    Time runs to the right; p = 3, m = 4, F = I = W = 1:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> from diffusionpipe.viz.sketch import sketch
    >>> schedule = zb_h1(3, 4)
    >>> print(sketch(simulate(schedule, uniform_costs(schedule))))
    0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = delayed(
        num_microbatches,
        warm_ups=[num_workers - 1 - stage for stage in range(num_workers)],
        delays=list(range(num_workers)),
    )
    return chain("zb-h1", orders, microbatches=[microbatch_size] * num_microbatches, ops=SPLIT)

"""ZB-H2: no idle time between a worker's first and last action, for twice the memory of 1F1B."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import SPLIT, chain, require_positive
from diffusionpipe.schedules.building.weight_gradient_delay import delayed


def zb_h2(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """ZB-H1 with twice the warm-up, 2 (p - 1 - s) forwards on stage s, and twice the delay of W, 2 s turns.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 2. The orders
    of the workers form a parallelogram: worker s starts s F later than the first and ends s F later. If the next
    iteration need not wait for the end of this one (the paper's optimizer checks afterwards), no worker is idle.
    Otherwise the makespan counts, which equals that of `zb_h1` if F = I = W.

    With p stages of equal times F, I and W, m >= 2 p - 1 micro-batches, and free communication:

        window                  m (F + I + W) + (p - 1) max(0, F + I - 2 W), from a worker's first start to its last end
        time                    3 m + p - 1 if F = I = W = 1
        activations in flight   min(2 p - 1, m) on every worker, on the worker of stage s at most 2 (p - s) - 1 before
                                I, 2 s between I and W

    Time runs to the right; p = 3, m = 6, F = I = W = 1:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> from diffusionpipe.viz.sketch import sketch
    >>> schedule = zb_h2(3, 6)
    >>> print(sketch(simulate(schedule, uniform_costs(schedule))))
    0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = delayed(
        num_microbatches,
        warm_ups=[2 * (num_workers - 1 - stage) for stage in range(num_workers)],
        delays=[2 * stage for stage in range(num_workers)],
    )
    return chain("zb-h2", orders, microbatches=[microbatch_size] * num_microbatches, ops=SPLIT)

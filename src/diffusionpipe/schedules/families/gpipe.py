"""GPipe: all forwards, then all backwards."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def gpipe(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Every worker runs all its forwards and then all its backwards, both in the order of the micro-batches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
    https://arxiv.org/abs/1811.06965, section 2. The backwards run in the same order as the forwards.

    With p stages of equal times F and B and m micro-batches, and free communication:

        time                    (m + p - 1) (F + B)
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   m on every worker

    Time runs to the right; this is each worker's order:

    >>> for order in gpipe(3, 4).orders:
    ...     print(*order)
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = [
        forwards(stage, 0, num_microbatches) + backwards(stage, 0, num_microbatches) for stage in range(num_workers)
    ]
    return chain("gpipe", orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)

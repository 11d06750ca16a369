"""1F1B: after a short warm-up one forward and one backward in turn."""

from diffusionpipe.ir import Action, Schedule
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def one_f_one_b(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Stage s runs p - s - 1 forwards, then a forward and a backward in turn, then the remaining backwards.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2, with the
    flush of Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
    https://arxiv.org/abs/2007.01045, section 3 (policy A).

    With p stages of equal times F and B and m micro-batches, and free communication:

        time                    (m + p - 1) (F + B)
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   min(p - s, m) on the worker of stage s

    There may be fewer micro-batches than stages. Then all stages but the last ones warm up with all micro-batches.
    Time runs to the right; this is each worker's order:

    >>> for order in one_f_one_b(3, 4).orders:
    ...     print(*order)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = [_order(stage, num_workers, num_microbatches) for stage in range(num_workers)]
    return chain("1f1b", orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)


def _order(stage: int, num_workers: int, num_microbatches: int) -> list[Action]:
    warm_up = min(num_workers - stage - 1, num_microbatches)
    num_steady = num_microbatches - warm_up
    steady = [
        action
        for i in range(num_steady)
        for action in forwards(stage, warm_up + i, warm_up + i + 1) + backwards(stage, i, i + 1)
    ]
    return forwards(stage, 0, warm_up) + steady + backwards(stage, num_steady, num_microbatches)

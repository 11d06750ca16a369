"""One micro-batch at a time through all stages: least memory, and only one worker computes."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def sequential(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Every stage runs the backward of a micro-batch before the forward of the next one.

    Model parallelism without a pipeline (Huang et al., "GPipe", NeurIPS 2019, https://arxiv.org/abs/1811.06965,
    figure 2b, for several micro-batches). It is for models that fit only with the activations of a single micro-batch.
    All bubbles are long, so frozen work of any size fits into them.

    With p stages of equal times F and B and m micro-batches, and free communication:

        time                    m p (F + B)
        bubble                  (p - 1) / p of it
        activations in flight   1 on every worker

    >>> for order in sequential(2, 3).orders:
    ...     print(*order)
    0F0 0B0 0F1 0B1 0F2 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = [
        [
            action
            for microbatch in range(num_microbatches)
            for action in forwards(stage, microbatch, microbatch + 1) + backwards(stage, microbatch, microbatch + 1)
        ]
        for stage in range(num_workers)
    ]
    return chain("sequential", orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)

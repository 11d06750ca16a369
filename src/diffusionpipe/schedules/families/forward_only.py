"""Forward only: validation and sampling."""

from collections.abc import Sequence

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import FORWARD, Pipe, linear, require_positive, schedule_of


def forward_only(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Every worker runs the forward of every micro-batch, in order.

    The first half of GPipe (Huang et al., NeurIPS 2019). With p stages of equal time F and m micro-batches, and free
    communication:

        time                    (m + p - 1) F
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   1: nothing is kept for a backward

    >>> for order in forward_only(2, 3).orders:
    ...     print(*order)
    0F0 0F1 0F2
    1F0 1F1 1F2

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    return forward_over(linear(num_workers), [microbatch_size] * num_microbatches)


def forward_over(workers: Sequence[int], microbatches: Sequence[int]) -> Schedule:
    """The schedule of forwards of these micro-batches through stages on these workers, some of which hold several.

    `workers`: the worker of each stage. `microbatches`: the samples of each micro-batch.

    In each time slot a worker runs, of the forwards that can start, the one that is furthest down the model.

    >>> for order in forward_over((0, 1, 1, 0), [1, 1]).orders:  # a V
    ...     print(*order)
    0F0 0F1 3F0 3F1
    1F0 2F0 1F1 2F1

    Raises:
        ConfigError: there is no worker or no micro-batch.
    """
    require_positive(num_stages=len(workers), num_microbatches=len(microbatches), microbatch_size=min(microbatches))
    orders: list[list[Action]] = [[] for _ in range(1 + max(workers))]
    done = [0] * len(workers)  # micro-batches that have passed each stage
    while done[-1] < len(microbatches):
        taken: dict[int, int] = {}
        for stage, worker in enumerate(workers):
            ready = len(microbatches) if stage == 0 else done[stage - 1]
            if done[stage] < ready:
                taken[worker] = stage  # a later stage takes the place of an earlier one
        for worker, stage in taken.items():
            orders[worker].append(compute_action(stage, Op.F, done[stage]))
            done[stage] += 1
    pipe = Pipe(workers=tuple(workers), microbatches=tuple(microbatches), ops=FORWARD)
    return schedule_of("forward", [pipe], orders)

"""kFkB: 1F1B over groups of micro-batches."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.alternation import alternate
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def kfkb(num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, group_size: int = 2) -> Schedule:
    """1F1B over groups of k micro-batches, 2 by default: k forwards and k backwards in turn.

    Wang et al., "Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network by Adaptive Group-Scheduling for
    Micro-Batches", 2023, https://arxiv.org/abs/2303.01675. k is `group_size`: 1 is 1F1B, m GPipe; recipes and
    commands name it with the schedule, "kfkb-3". While a transfer is under way, the worker computes the other
    micro-batches of the group. This needs k times the activations.

    With p stages of equal times F and B and m micro-batches, and free communication:

        time                    (m + p - 1) (F + B)
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   min(k (p - s), m) on the worker of stage s

    With k > 1 and transfers of time c <= (k - 1) F and c <= (k - 1) B, each group hides its own transfers, and the time
    grows by only 2 (p - 1) c. Any number of micro-batches works; the last group may be smaller.

    >>> for order in kfkb(3, 5).orders:
    ...     print(*order)
    0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4
    1F0 1F1 1F2 1F3 1B0 1B1 1F4 1B2 1B3 1B4
    2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3 2F4 2B4

    Raises:
        ConfigError: a size or `group_size` is below 1.
    """
    require_positive(
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
    )
    starts = range(0, num_microbatches, group_size)
    groups = [(start, min(start + group_size, num_microbatches)) for start in starts]
    orders = [
        alternate(
            [forwards(stage, *group) for group in groups],
            [backwards(stage, *group) for group in groups],
            warm_up=min(num_workers - stage - 1, len(groups)),
        )
        for stage in range(num_workers)
    ]
    return chain("kfkb", orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)

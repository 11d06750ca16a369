"""Looped breadth-first: GPipe over several chunks of the model on each worker."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import (
    TRAIN,
    Pipe,
    backwards,
    forwards,
    loop,
    require_positive,
    schedule_of,
)


def looped_bfs(num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, chunks: int = 2) -> Schedule:
    """All forwards of a worker's first chunk, of its second, ..., then all backwards from its last chunk to its first.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, https://arxiv.org/abs/2211.05953. The model is cut
    into v p stages, v = `chunks`; worker s holds the stages s, s + p, s + 2p, ... A chunk works without a break. So if
    weights are sharded, a worker gathers the weights of a chunk only twice, and reduces its gradients only once, while
    other chunks work. The backwards run in the order of the forwards.

    With m micro-batches, stages of equal times F and B (a v-th of a worker's share of the model each), and free
    communication:

        time                    (v m + p - 1 + (v - 1) max(0, p - m)) (F + B)
        bubble                  (p - 1) / (v m + p - 1) of it where m >= p
        activations in flight   v m stages on every worker: m micro-batches

    Stages 0 and 3 are on worker 0, and so on:

    >>> for order in looped_bfs(3, 4).orders:
    ...     print(*order)
    0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 4F0 4F1 4F2 4F3 4B0 4B1 4B2 4B3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 5F0 5F1 5F2 5F3 5B0 5B1 5B2 5B3 2B0 2B1 2B2 2B3

    Raises:
        ConfigError: a size or `chunks` is below 1.
    """
    require_positive(
        num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size, chunks=chunks
    )
    orders = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * chunks, num_workers)
        ahead = [action for stage in stages for action in forwards(stage, 0, num_microbatches)]
        back = [action for stage in reversed(stages) for action in backwards(stage, 0, num_microbatches)]
        orders.append(ahead + back)
    pipe = Pipe(workers=loop(num_workers, chunks), microbatches=(microbatch_size,) * num_microbatches, ops=TRAIN)
    return schedule_of("looped-bfs", [pipe], orders)

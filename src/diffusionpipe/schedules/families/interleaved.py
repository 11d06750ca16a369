"""Interleaved 1F1B: several chunks of the model on each worker."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.alternation import alternate, depth_first, rounds
from diffusionpipe.schedules.building.shapes import (
    TRAIN,
    Pipe,
    backwards,
    forwards,
    loop,
    require_positive,
    schedule_of,
)


def interleaved(num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, chunks: int = 2) -> Schedule:
    """1F1B over v = `chunks` stages on each worker: a round of p micro-batches through all chunks, then the next round.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    https://arxiv.org/abs/2104.04473, section 2.2. The model is cut into v p stages; worker s holds the stages s,
    s + p, s + 2p, ... In the paper m must be a multiple of p. Here every m works: the micro-batches form
    max(1, floor(m / p)) rounds whose lengths differ by at most one, the longer ones first. With equal lengths this is
    the order of torch.distributed.pipelining's ScheduleInterleaved1F1B, which refuses all other m.

    With m micro-batches, stages of equal times F and B (a v-th of a worker's share of the model each), the longest
    round r = ceil(m / rounds), and free communication:

        time                    (v m + p - 1 + (v - 1) max(0, p - m)) (F + B)
        bubble                  (p - 1) / (v m + p - 1) of it where m >= p
        activations in flight   min(v m, (v - 1) r + 2 (p - s) - 1) stages on worker s;
                                so at most p + (p - 1) / v micro-batches where r = p

    Stages 0 and 3 are on worker 0, and so on:

    >>> for order in interleaved(3, 3).orders:
    ...     print(*order)
    0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2
    1F0 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 1B1 1B2
    2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2

    Raises:
        ConfigError: a size or `chunks` is below 1.
    """
    require_positive(
        num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size, chunks=chunks
    )
    in_rounds = rounds(num_microbatches, num_workers)
    sequence = depth_first(in_rounds, chunks)
    orders = [
        alternate(
            [forwards(chunk * num_workers + worker, i, i + 1) for chunk, i in sequence],
            [backwards((chunks - 1 - chunk) * num_workers + worker, i, i + 1) for chunk, i in sequence],
            # All chunks but the last for the first round. The first gradient comes back two turns later for each worker
            # after this one: its forward and its backward there.
            warm_up=min((chunks - 1) * len(in_rounds[0]) + 2 * (num_workers - worker - 1), len(sequence)),
        )
        for worker in range(num_workers)
    ]
    pipe = Pipe(workers=loop(num_workers, chunks), microbatches=(microbatch_size,) * num_microbatches, ops=TRAIN)
    return schedule_of("interleaved", [pipe], orders)

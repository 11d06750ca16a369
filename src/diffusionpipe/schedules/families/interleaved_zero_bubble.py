"""Interleaved zero bubble: interleaved 1F1B whose weight gradients wait for idle time."""

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.alternation import alternate, depth_first, rounds
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, forwards, loop, require_positive, schedule_of


def interleaved_zero_bubble(
    num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, chunks: int = 2
) -> Schedule:
    """Interleaved 1F1B with input gradients as early as possible; worker s does the weight gradients s turns later.

    ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, over v =
    `chunks` stages on each worker, as torch.distributed.pipelining's ScheduleInterleavedZeroBubble does it. One chunk
    is ZB-H1 itself. Stages and rounds are the same as in `interleaved`. torch refuses rounds of unequal lengths; here
    every m works. Gradients are sent after I, without waiting for W. So they reach worker 0 earlier, and its warm-up
    has only (v - 1) r + p - 1 forwards. The delayed W fill the bubble at the end, when the pipeline drains.

    With m >= p micro-batches, stages of equal times F = I = W (a v-th of a worker's share of the model each), the
    longest round r, and free communication:

        time                    v m (F + I + W) + (p - 1) (F + I - W)
        bubble                  (p - 1) (F + I - W) of it
        activations in flight   min(v m, (v - 1) r + p) stages on every worker; p micro-batches where r = p

    Stages 0 and 2 are on worker 0, 1 and 3 on worker 1:

    >>> for order in interleaved_zero_bubble(2, 2).orders:
    ...     print(*order)
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

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
            _backward_turns([((chunks - 1 - chunk) * num_workers + worker, i) for chunk, i in sequence], delay=worker),
            warm_up=min((chunks - 1) * len(in_rounds[0]) + num_workers - worker - 1, len(sequence)),
        )
        for worker in range(num_workers)
    ]
    pipe = Pipe(workers=loop(num_workers, chunks), microbatches=(microbatch_size,) * num_microbatches, ops=SPLIT)
    return schedule_of("interleaved-zb", [pipe], orders)


def _backward_turns(sequence: list[tuple[int, int]], *, delay: int) -> list[list[Action]]:
    """The backwards of a worker in turns: in each the I of one (stage, micro-batch) and the W of `delay` turns before.

    The last turn also has the W that are left. `sequence`: (stage, micro-batch) of each turn.
    """
    input_grads = [compute_action(stage, Op.I, i) for stage, i in sequence]
    weight_grads = [compute_action(stage, Op.W, i) for stage, i in sequence]
    turns = [
        [action, *weight_grads[i - delay : i - delay + 1]] if i >= delay else [action]
        for i, action in enumerate(input_grads)
    ]
    # The remaining W come at the end, with the last I.
    turns[-1] += weight_grads[max(0, len(sequence) - delay) :]
    return turns

"""ZeroPP: units of micro-batches, chunk by chunk, with the weight gradients in the waits."""

from collections.abc import Sequence

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.alternation import alternate, depth_first, rounds
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, forwards, loop, require_positive, schedule_of


def zeropp(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    chunks: int = 2,
    unit: int | None = None,
) -> Schedule:
    """For each unit of micro-batches: all forwards, chunk by chunk, then the backwards; weight gradients fill bubbles.

    Tang et al., "ZeroPP: Unleashing Exceptional Parallelism Efficiency through Tensor-Parallelism-Free Methodology",
    2024, https://arxiv.org/abs/2402.03791. In each direction a worker stays with one of its v = `chunks` chunks for all
    micro-batches of a scheduling unit. So sharded weights are gathered once for each unit, chunk and direction. In the
    last chunk forwards and input gradients take turns as soon as the first gradient is back. After the forwards,
    gradients arrive in every second slot only, and weight gradients fill the slots between them.

    This is our reading; the paper has no public code. It differs in one point: a unit may have any length of at least
    `unit` (None: 2p - 1, the shortest without bubbles). There are as many units as that allows, their lengths differ by
    at most one, and any number m of micro-batches works.

    With n units of length U >= p, stages of equal times F = I = W (a v-th of a worker's share of the model each), and
    free communication:

        time                    3 v m F + (p - 1) F + (n - 1) max(0, 2p - 1 - U) F
        bubble                  (p - 1) F of it where U >= 2p - 1: the start alone
        activations in flight   v U stages on every worker: U micro-batches

    Stages 0 and 2 are on worker 0, 1 and 3 on worker 1:

    >>> for order in zeropp(2, 3).orders:
    ...     print(*order)
    0F0 0F1 0F2 2F0 2F1 2F2 2I0 2W0 2I1 2W1 2I2 0I0 0I1 0I2 2W2 0W0 0W1 0W2
    1F0 1F1 1F2 3F0 3I0 3F1 3I1 3F2 3I2 1I0 1I1 1I2 3W0 3W1 3W2 1W0 1W1 1W2

    Raises:
        ConfigError: a size, `chunks` or `unit` is below 1.
    """
    require_positive(
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        chunks=chunks,
        unit=1 if unit is None else unit,
    )
    units = rounds(num_microbatches, 2 * num_workers - 1 if unit is None else unit)
    orders = [
        [
            action
            for one in units
            for action in _unit_order(
                one, stages=range(worker, chunks * num_workers, num_workers), hops=num_workers - 1 - worker
            )
        ]
        for worker in range(num_workers)
    ]
    pipe = Pipe(workers=loop(num_workers, chunks), microbatches=(microbatch_size,) * num_microbatches, ops=SPLIT)
    return schedule_of("zeropp", [pipe], orders)


def _unit_order(unit: range, *, stages: Sequence[int], hops: int) -> list[Action]:
    """The order of a worker for one unit of micro-batches.

    The worker holds `stages`, and the last worker is `hops` workers after it.
    """
    ahead = depth_first([unit], len(stages))
    back = [(stages[-1 - chunk], microbatch) for chunk, microbatch in ahead]
    input_grads = [compute_action(stage, Op.I, microbatch) for stage, microbatch in back]
    weight_grads = [compute_action(stage, Op.W, microbatch) for stage, microbatch in back]
    # The first gradient is back after a forward and a gradient on each of the workers behind.
    warm_up = min((len(stages) - 1) * len(unit) + 2 * hops, len(ahead))
    # The last chunk's gradients after the last forward come in every second slot, so there is a wait before each.
    first_wait = max(1, len(ahead) - warm_up)
    num_waits = max(0, len(unit) - first_wait)
    turns = [[action] for action in input_grads]
    for wait in range(num_waits):
        turns[first_wait + wait].insert(0, weight_grads[wait])
    turns.append(weight_grads[num_waits:])
    return alternate([forwards(stages[chunk], i, i + 1) for chunk, i in ahead], turns, warm_up=warm_up)

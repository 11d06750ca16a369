"""ZB-V: no idle time between a worker's first and last action, in the memory of 1F1B."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.building_block import v_work
from diffusionpipe.schedules.building.greedy_v import greedy_orders
from diffusionpipe.schedules.building.shapes import require_positive
from diffusionpipe.schedules.building.split_work import UNIT_COSTS, Goal, SplitWork, schedule_of_work
from diffusionpipe.schedules.building.squeeze import best_squeezed
from diffusionpipe.units import Seconds


def zb_v(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
    objective: Goal = Goal.MAKESPAN,
) -> Schedule:
    """Each worker has two stages of a V, and runs F, I and W of the one and of the other in turn.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 6 (ZB-V), and
    "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362 (V-ZB). The pattern
    is the pattern of torch.distributed.pipelining's ScheduleZBVZeroBubble. The generator squeezes (`squeeze`) this
    pattern and the greedy construction of the second paper (`greedy_v`) with the given costs, one for all stages or one
    for each. Both stay within the memory of the pattern's fullest worker. The result is the order with the shortest
    `objective`: the makespan, or the window, to which "zero bubble" refers.

    With F = I = W = 1 on each of the 2p stages, free communication and m >= p micro-batches:

        window                  6m + max(0, 2p - 1 - m), from a worker's first start to its last end
        time                    6m + p - 1
        activations in flight   2p stages on every worker, the memory of 1F1B

    Time runs to the right; p = 2, m = 4. Stages 0 and 3 are on worker 0:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> from diffusionpipe.viz.sketch import sketch
    >>> schedule = zb_v(2, 4)
    >>> print(sketch(simulate(schedule, uniform_costs(schedule))))
    0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
    1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 1W3 2W3

    Raises:
        ConfigError: a size is below 1, or there are costs for another number of stages.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    pattern = partial(_orders, num_workers)
    work = v_work(pattern, num_microbatches, costs=costs, latency=latency)
    orders = best_squeezed(work, _candidates(pattern, work), objective=objective)
    return schedule_of_work("zb-v", work, orders, microbatch_size)


def _candidates(pattern: Callable[[int], list[list[Action]]], work: SplitWork) -> Iterator[list[list[Action]]]:
    """The orders to squeeze: of the pattern, then of the greedy construction.

    The greedy ones are made only if the caller asks for them, because the pattern was not the best that can be.
    """
    yield pattern(work.num_microbatches)
    yield from greedy_orders(work)


def _orders(num_workers: int, num_microbatches: int) -> list[list[Action]]:
    """The pattern's order of each worker: the one for at least p micro-batches, without micro-batches too many."""
    orders = [_order(worker, num_workers, max(num_workers, num_microbatches)) for worker in range(num_workers)]
    return [[action for action in order if (action.microbatch or 0) < num_microbatches] for order in orders]


def _order(worker: int, num_workers: int, num_microbatches: int) -> list[Action]:
    """The pattern's order of one worker: the pipeline fills (three lines), runs (one), and runs empty (three)."""
    # `later`: this worker and all after it.
    down, up, later = worker, 2 * num_workers - 1 - worker, num_workers - worker
    turns = [
        *[(down, Op.F)] * (2 * later - 1),
        *[(up, Op.F), (down, Op.F)] * worker,
        *[(up, Op.F), (up, Op.I), (up, Op.W)] * later,
        *[(down, Op.F), (down, Op.I), (down, Op.W), (up, Op.F), (up, Op.I), (up, Op.W)]
        * (num_microbatches - num_workers),
        *[(down, Op.I), (up, Op.I)] * worker,
        *[(down, Op.I), (down, Op.W)] * later,
        *[(down, Op.W), (up, Op.W)] * worker,
    ]
    counts: Counter[tuple[int, Op]] = Counter()
    order = []
    for stage, op in turns:
        if counts[stage, op] < num_microbatches:  # there may be fewer F than fill the pipeline
            order.append(compute_action(stage, op, counts[stage, op]))
            counts[stage, op] += 1
    return order

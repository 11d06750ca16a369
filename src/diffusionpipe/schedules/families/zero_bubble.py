"""ZB-1p and ZB-2p: a zero-bubble schedule for given times and a given memory."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Schedule
from diffusionpipe.schedules.building.shapes import linear, require_positive
from diffusionpipe.schedules.building.split_work import UNIT_COSTS, SplitWork, costs_of_stages, schedule_of_work
from diffusionpipe.schedules.building.squeeze import best_squeezed
from diffusionpipe.schedules.building.weight_gradient_delay import delayed
from diffusionpipe.units import Bytes, Seconds


def zb_1p(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
) -> Schedule:
    """A zero-bubble order in the memory of 1F1B: every worker may hold the activations of p micro-batches.

    With unit costs it has the time of ZB-H1:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> schedule = zb_1p(4, 8)
    >>> simulate(schedule, uniform_costs(schedule)).makespan
    27

    Raises:
        ConfigError: a size is below 1, or there are costs for another number of stages.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    stages = costs_of_stages(costs, num_workers)
    limits = [num_workers * stage.activation for stage in stages]
    return _shortest("zb-1p", _work(num_microbatches, stages, latency, limits), microbatch_size)


def zb_2p(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
) -> Schedule:
    """A zero-bubble order in twice the memory of 1F1B: every worker may hold the activations of 2 p micro-batches.

    With unit costs no worker is idle between its first and its last action:

    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> schedule = zb_2p(4, 8)
    >>> timeline = simulate(schedule, uniform_costs(schedule))
    >>> [timeline.window(worker) for worker in range(4)]
    [24, 24, 24, 24]

    Raises:
        ConfigError: a size is below 1, or there are costs for another number of stages.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    stages = costs_of_stages(costs, num_workers)
    limits = [2 * num_workers * stage.activation for stage in stages]
    return _shortest("zb-2p", _work(num_microbatches, stages, latency, limits), microbatch_size)


def zero_bubble(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    limits: Sequence[Bytes],
    costs: StageCosts | Sequence[StageCosts] = UNIT_COSTS,
    latency: Seconds = 0,
) -> Schedule:
    """A short schedule of F, I and W over one stage on each worker, which may hold `limits` in activations.

    The task of the automatic scheduler of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
    https://arxiv.org/abs/2401.10241, section 3, solved in another way. The paper's heuristic fills idle time with W
    while it builds the schedule. Here ZB-H1, ZB-H2 and patterns between or beyond, as wide as memory allows, are
    squeezed (`squeeze`), and the shortest is taken: by makespan, then by window. Works for all sizes, any times of each
    stage, and any memory that holds one micro-batch.

    Raises:
        ConfigError: a size is below 1, there are costs or limits for another number of stages, or a worker cannot hold
            one micro-batch.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    if len(limits) != num_workers:
        raise ConfigError(f"{len(limits)} limits for {num_workers} workers; give one for each worker")
    work = _work(num_microbatches, costs_of_stages(costs, num_workers), latency, limits)
    return _shortest("zb", work, microbatch_size)


def _work(num_microbatches: int, costs: tuple[StageCosts, ...], latency: Seconds, limits: Sequence[Bytes]) -> SplitWork:
    return SplitWork(
        workers=linear(len(costs)),
        num_microbatches=num_microbatches,
        costs=costs,
        latency=latency,
        limits=tuple(limits),
    )


def _shortest(name: str, work: SplitWork, microbatch_size: int) -> Schedule:
    return schedule_of_work(name, work, best_squeezed(work, _patterns(work)), microbatch_size)


def _patterns(work: SplitWork) -> Iterator[list[list[Action]]]:
    """The orders to squeeze: ZB-H1 (pace 1), ZB-H2 (pace 2) and a pattern that fills the memory, by worker.

    Each has fewer warm-up forwards and shorter delays of W where it would need more memory than there is.
    """
    m, last = work.num_microbatches, len(work.limits) - 1
    counts = [
        limit // cost.activation if limit < m * cost.activation else 2 * len(work.limits)  # all fit: as wide as ZB-H2
        for limit, cost in zip(work.limits, work.costs, strict=True)
    ]
    # As wide as the least memory lets the first stage be: pace x last warm-ups, and one more in flight.
    widest = (min(counts) - 1) / last if last else 0
    for pace in dict.fromkeys((1, 2, widest)):
        wanted = [min(round(pace * (last - stage)), count - 1) for stage, count in enumerate(counts)]
        warm_ups = list(accumulate(wanted, min))  # a stage that warms up longer than the one before waits for ever
        delays = [
            min(round(pace * stage), count - 1 - warm_up)
            for stage, (count, warm_up) in enumerate(zip(counts, warm_ups, strict=True))
        ]
        yield delayed(m, warm_ups=warm_ups, delays=delays)

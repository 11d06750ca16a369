"""Hanayo: micro-batches run in waves down and up the workers."""

from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.schedules.building.list_scheduling import UNIT_TIMES, ListSchedule, StageTimes, list_schedule
from diffusionpipe.schedules.building.shapes import TRAIN, Pipe, require_positive, schedule_of, wave
from diffusionpipe.units import Seconds


def hanayo(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    waves: int = 1,
    times: StageTimes = UNIT_TIMES,
    max_in_flight: int | None = None,
) -> Schedule:
    """Each worker has 2w stages, and a micro-batch goes down and up the workers w = `waves` times.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency", SC
    2023, https://arxiv.org/abs/2308.15762. Where a wave turns, the next stage is on the same worker and nothing is
    sent. One wave on p workers is half of Chimera on 2p workers, without Chimera's second copy of the weights.

    The placement is the paper's. The orders are ours and work for any m. They come from list scheduling: every worker
    starts the action that is due first. An action of micro-batch i is due at i times a pace, plus the time from the
    start of the micro-batch to the action without any wait. A slow pace separates micro-batches and needs less memory;
    a fast pace fills the start sooner. The generator tries three paces and takes the shortest result, and of equally
    short results the one with the slowest pace. `times` are the times of one stage. `max_in_flight` limits the
    micro-batches inside the pipeline (None: no limit).

    With stages of equal times B = 2F (a 2w-th of a worker's share of the model each) and free communication:

        time                    at least (2 w m + p - 1) (F + B), which is reached where m >= 2p;
                                w = 1: reached where 2 (m - 1) >= 3 (p - 1); before, longer by the difference in F;
                                so (10p - 4) F for m = p, which is Chimera's time for 2p workers and micro-batches
        bubble                  (p - 1) / (2 w m + p - 1) of it where it is reached: a 2w-th of 1F1B's bubble
        activations in flight   w = 1: at most min(m, 3p / 2) micro-batches on a worker; w = 2: min(m, 3p / 2 + 1)

    >>> for order in hanayo(2, 2).orders:
    ...     print(*order)
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    Raises:
        ConfigError: a size, `waves` or `max_in_flight` is below 1.
    """
    require_positive(
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        waves=waves,
        max_in_flight=1 if max_in_flight is None else max_in_flight,
    )
    pipe = Pipe(workers=wave(num_workers, 2 * waves), microbatches=(microbatch_size,) * num_microbatches, ops=TRAIN)
    # From the slowest pace to the fastest: of equally short results `min` takes the first.
    candidates = [_paced(pipe, pace, times, max_in_flight) for pace in (4, 3, 2)]
    return schedule_of("hanayo", [pipe], min(candidates, key=lambda candidate: candidate.makespan).orders)


def _paced(pipe: Pipe, pace: int, times: StageTimes, max_in_flight: int | None) -> ListSchedule:
    """The list schedule in which micro-batches are due at a distance of `pace` thirds of F + B."""
    last = len(pipe.workers) - 1
    distance = pace * (times.forward + times.backward)  # three times as long, as `pace` counts thirds

    def due(action: Action) -> tuple[Seconds, ...]:
        assert action.microbatch is not None
        if action.op is Op.F:
            path = action.stage * times.forward
        else:
            path = (last + 1) * times.forward + (last - action.stage) * times.backward
        return (action.microbatch * distance + 3 * path,)

    total = len(pipe.microbatches)
    # The first stage holds a micro-batch until its last backward, so its limit is one for the whole pipeline.
    limits = [max_in_flight or total, *[total] * last]
    return list_schedule([pipe], due, times=[times] * len(limits), limits=limits)

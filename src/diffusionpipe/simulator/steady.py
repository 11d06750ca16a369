"""How long a batch takes where the order repeats for ever: the rate at which a window repeats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Op, Schedule, Timeline
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.simulator.simulate import simulate

MOST_BATCHES = 512
"""The most batches that are simulated."""
ROUNDING = 1e-9
"""The part of the period by which times between ends may differ and still count as equal; for costs that are floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The time of a batch and the bubble of a window that repeats for ever, exact for whole numbers and Fractions."""

    period: Fraction
    """The mean time from the end of a batch to that of the next one."""
    bubble: Fraction
    """The part of the period in which workers idle."""


def steady(window: Schedule, costs_of: Callable[[Schedule], Costs]) -> Steady:
    """The period and the bubble of a window that repeats for ever, by simulating batches until they repeat.

    The number of batches is doubled until the times between their ends repeat.

    Measured times may need more than `MOST_BATCHES`, because waits drift by tiny differences from one batch to the
    next. Then the period is the mean of the second half of the batches.

    `costs_of` returns the costs of a schedule that the window unrolls to. With 4 workers, a forward of 1, a backward of
    2 and a micro-batch for each batch, no worker ever waits:

    >>> from diffusionpipe.planner.assembly.windows import overlap
    >>> from diffusionpipe.simulator import uniform_costs
    >>> steady(overlap(4, 1), uniform_costs)
    Steady(period=Fraction(3, 1), bubble=Fraction(0, 1))
    """
    batches = first_batches(window)
    while True:
        unrolled = unroll(window, batches)
        timeline = simulate(unrolled, costs_of(unrolled))
        ends = _ends(timeline)
        between = [after - before for before, after in pairwise(ends)]
        # The last batches have no others behind them, and their windows encode none.
        between = between[: len(between) - window.num_workers - window.lead]
        # A period counts if the last half of the batches repeats it, and at least four repetitions are seen: shorter
        # runs of equal times may be chance.
        for length in range(1, len(between) // 4 + 1):
            tail = between[-max(4 * length, len(between) // 2) :]
            if _are_equal(tail[length:], tail[:-length]):
                # Whole periods alone, so the mean is exact.
                return _steady(timeline, window.num_workers, batches, between[-length:])
        if 2 * batches > MOST_BATCHES:
            return _steady(timeline, window.num_workers, batches, between[len(between) // 2 :])
        batches *= 2


def _steady(timeline: Timeline, workers: int, batches: int, between: Sequence[Fraction]) -> Steady:
    """The mean of the times `between` ends of batches as the period, and the bubble in it.

    `timeline` has the `workers` and `batches`; its work for each batch is the same.
    """
    period = sum(between, Fraction(0)) / len(between)
    # Every batch has the same work, so all of the timeline's may be divided, start and end included.
    busy = sum((Fraction(timeline.busy(worker)) for worker in range(workers)), Fraction(0)) / batches
    return Steady(period=period, bubble=1 - busy / (workers * period))


def first_batches(window: Schedule) -> int:
    """The number of batches with which `steady` begins: enough for most windows to repeat."""
    # `steady` leaves out the last `num_workers + lead` batches, so the number begins with them.
    return 4 + window.num_workers + window.lead + -(-16 * window.num_workers // window.num_microbatches())


def _are_equal(some: Sequence[Fraction], others: Sequence[Fraction]) -> bool:
    """Whether both sequences are equal, but for the rounding of floats."""
    limit = ROUNDING * max(map(abs, some), default=0)
    return all(abs(one - other) <= limit for one, other in zip(some, others, strict=True))


def _ends(timeline: Timeline) -> list[Fraction]:
    """The end of the first worker's optimizer step of each batch, in order."""
    return [Fraction(span.end) for span in timeline.spans if span.worker == 0 and span.action.op is Op.STEP]

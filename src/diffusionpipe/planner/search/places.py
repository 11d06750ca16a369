"""Where a batch can be cut: the ways to form pipelines from the ranks, and numbers of micro-batches."""

from collections.abc import Collection, Iterator

from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.search.constants import MAX_MICROBATCHES
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds


def places_of(
    judge: Judge, units: Collection[int] | None = None, *, is_filled: bool = False, ramp: float = 1.0
) -> Iterator[tuple[Seconds, Arrangement, int]]:
    """(lower bound, arrangement, micro-batches) wherever the batch can be cut."""
    batch, given = judge.setting.workload.batch, judge.setting.given
    for arrangement in arrangements(judge.setting.cluster):
        if units is not None and arrangement.units not in units:
            continue
        if not given.allows(units=arrangement.units, data_parallel=arrangement.data_parallel):
            continue
        if arrangement.units > judge.tables.num_layers or batch % arrangement.data_parallel:
            continue
        rows = batch // arrangement.data_parallel
        counts = [given.microbatches] if given.microbatches else range(1, min(rows, MAX_MICROBATCHES) + 1)
        for microbatches in counts:
            if rows % microbatches == 0:
                bound = _lower_bound(judge, arrangement, microbatches, is_filled=is_filled, ramp=ramp)
                yield bound, arrangement, microbatches


def _lower_bound(judge: Judge, arrangement: Arrangement, microbatches: int, *, is_filled: bool, ramp: float) -> Seconds:
    """No partition into stages of one unit each takes less time, with the frozen work, if `ramp` is 1.

    Frozen work fills its waits or runs before. `ramp` is the part of the waits at both ends that counts.
    """
    work, waits = judge.tables.least_times(arrangement, microbatches)
    rows = -(-judge.setting.workload.batch // judge.setting.cluster.num_ranks)
    frozen = arrangement.units * judge.tables.computing(rows) / sum(judge.tables.ground(arrangement).speeds)
    return max(work + ramp * waits + (0.0 if is_filled else frozen), work + frozen)

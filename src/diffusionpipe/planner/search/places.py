"""Lists the ways to form pipelines from the ranks with numbers of micro-batches, and computes bounds of their times."""

from collections.abc import Collection, Iterator
from operator import add

from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.search.constants import MAX_MICROBATCHES, MAX_UNEQUAL_UNITS
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds


def places_of(
    judge: Judge, units: Collection[int] | None = None, *, is_filled: bool = False, ramp: float = 0.0
) -> Iterator[tuple[Seconds, Arrangement, int]]:
    """(least time in seconds, arrangement, micro-batches) of every way to cut the batch over all ranks.

    `units`: the numbers of ranks that a pipeline may have; None for any.

    `ramp` is the part of the waits at both ends of a pipeline that counts. With more than 0 the time is not a lower
    bound, but sorts good places to the front. `is_filled`: frozen work runs in waits.
    """
    batch, given = judge.setting.workload.batch, judge.setting.given
    for arrangement in arrangements(judge.setting.cluster):
        if units is not None and arrangement.units not in units:
            continue
        sizes = {"units": arrangement.units, "data_parallel": arrangement.data_parallel}
        for microbatches in _cuts(given, batch=batch, num_layers=judge.tables.num_layers, **sizes):
            least = least_time(judge, arrangement, microbatches)
            expected = _with_waits(judge, arrangement, microbatches, ramp, is_filled)
            yield max(least, expected), arrangement, microbatches


def is_cuttable(given: Given, *, batch: int, num_ranks: int, num_layers: int) -> bool:
    """Whether `num_ranks` ranks can share `num_layers` trained layers and the batch; else `places_of` is empty."""
    groups = (copies for copies in range(1, num_ranks + 1) if num_ranks % copies == 0)
    sizes = ({"units": num_ranks // copies, "data_parallel": copies} for copies in groups)
    return any(True for size in sizes for _ in _cuts(given, batch=batch, num_layers=num_layers, **size))


def _cuts(given: Given, *, batch: int, num_layers: int, units: int, data_parallel: int) -> Iterator[int]:
    """The numbers of micro-batches that are allowed for `data_parallel` pipelines of `units` ranks each."""
    if batch % data_parallel or not given.allows(units=units, data_parallel=data_parallel):
        return
    rows = batch // data_parallel
    for microbatches in [given.microbatches] if given.microbatches else range(1, min(rows, MAX_MICROBATCHES) + 1):
        if rows % microbatches == 0 and _are_enough_layers(given, units, num_layers, rows // microbatches):
            yield microbatches


def _are_enough_layers(given: Given, units: int, layers: int, samples: int) -> bool:
    """Whether the layers suffice for stages that take all units together.

    Each stage has at least one layer and takes one unit or, as replicas, a divisor of `samples`.
    """
    if units <= layers:
        return True
    if units > MAX_UNEQUAL_UNITS or given.stages is not None or not given.allows_chains:
        return False
    divisors, sums = [n for n in range(1, units + 1) if samples % n == 0], {0}
    for _ in range(layers):
        sums |= {one + n for one in sums for n in divisors}  # all numbers of units that stages can take together
    return units in sums


def least_time(judge: Judge, arrangement: Arrangement, microbatches: int) -> Seconds:
    """A lower bound in seconds of every plan's iteration at a place.

    In it all devices work all the time; if stages cannot have replicas, micro-batches also pass all layers.
    """
    tables, setting = judge.tables, judge.setting
    samples = tables.unit_samples(arrangement, microbatches)
    work = tables.least_work(samples) + tables.least_encoding
    busy = setting.workload.batch * work / (arrangement.data_parallel * sum(tables.ground(arrangement).speeds))
    if setting.owners == 1 and arrangement.units <= MAX_UNEQUAL_UNITS and setting.given.stages is None:
        return busy  # stages may have replicas, which share the way through their layers
    # With states in parts no schedule has two directions.
    in_turn = microbatches if setting.owners > 1 else -(-microbatches // 2)
    return max(busy, least_passage(judge, arrangement, microbatches, in_turn=in_turn))


def least_passage(judge: Judge, arrangement: Arrangement, microbatches: int, *, in_turn: int) -> Seconds:
    """A lower bound in seconds of a pipeline's iteration without replicas, for any cuts and any order.

        worker 0   F0 F1          I0 I1 W0 W1       [1] a micro-batch passes all layers and comes back
        worker 1      F0 F1 I0 W0 I1 W1             [2] the dearest layer of this way has all others to do besides
                                                    [3] the gradients of the first layer's weights come last

    Each layer is on the way of `in_turn` micro-batches through one worker: of all, or of half of them where two
    directions share them. One of these is the last at the dearest layer, and has its way on from there before it.
    0 for several models.
    """
    tables, setting = judge.tables, judge.setting
    if len(setting.graph.backbones) > 1:
        return 0.0
    casting = None if setting.graph.probes else microbatches  # a probe shares the casts of weights
    forward, back, rest = tables.table.sums(tables.unit_samples(arrangement, microbatches), casting).layers
    if not setting.may_split:
        # Whole backwards: the weights' part delays the gradient too.
        back, rest = list(map(add, back, rest)), [0.0] * len(rest)
    longest: list[tuple[Seconds, Seconds, Seconds]] = []  # by layer the way up to it: [1], [2], [3]
    for layer, before in enumerate(tables.gradient_edges):
        # Each way gives a bound: the longest one does.
        way = max((longest[other] for other in before), default=(0.0, 0.0, rest[layer]))
        longest.append((way[0] + forward[layer] + back[layer], max(way[1], forward[layer], back[layer]), way[2]))
    once, dearest, last = max(longest)
    return (once + (in_turn - 1) * dearest + last) / max(tables.ground(arrangement).speeds)


def _with_waits(judge: Judge, arrangement: Arrangement, microbatches: int, ramp: float, is_filled: bool) -> Seconds:
    """The expected seconds of an iteration with stages of one unit each and the part `ramp` of their waits.

    Frozen work fills the waits or runs before. 0 if `ramp` is 0.
    """
    if not ramp:
        return 0.0
    work, waits = judge.tables.least_times(arrangement, microbatches)
    rows = -(-judge.setting.workload.batch // judge.setting.cluster.num_ranks)
    frozen = arrangement.units * judge.tables.computing(rows) / sum(judge.tables.ground(arrangement).speeds)
    return max(work + ramp * waits + (0.0 if is_filled else frozen), work + frozen)

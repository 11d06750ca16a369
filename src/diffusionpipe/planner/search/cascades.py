"""Makes candidates for two backbones, each kind at its own best sizes, so that they can be compared.

    opposed            the first backbone down the devices, the second up            opposed_partition, opposed.py
    together           both down the devices, their micro-batches mixed
    in turn            the whole of the first, then the whole of the second; on one device, whole copies of both: the
                       sums of the first's gradients run beside the second's compute
    divided            each on devices of its own, as a pipeline or as copies
    in turn, sharded   copies of both, with parameters in parts

Numbers of micro-batches are tried in pairs: with backbones of unequal work, numbers in proportion to it give
micro-batches of equal time. The pairs of an arrangement are looked at by what a kind takes without transfers and
reductions, the best `NUM_PAIRS` of each kind.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import gcd, lcm
from typing import TypeAlias

from diffusionpipe.holding.memory import Trait
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import (
    MAX_MICROBATCHES,
    MAX_SHARDED_FORWARDS,
    MAX_UNEQUAL_UNITS,
    NUM_IMPROVED,
    NUM_OF_ARRANGEMENT,
    NUM_OF_KIND,
    NUM_PAIRS,
    NUM_THOROUGH,
    PAIR_ACTIONS,
    QUICK_EFFORT,
    SLACKS,
    WIDTH,
)
from diffusionpipe.planner.search.improvement import bucketed, move_cuts
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.opposed_partition import bounded_pairs, first_pairs, quick_pairs
from diffusionpipe.planner.search.pair_objectives import OppositeLoads, OppositePath, PairObjective, SameLoads
from diffusionpipe.planner.search.pair_questions import PairPlace
from diffusionpipe.planner.search.pool import Judged, Pool
from diffusionpipe.planner.search.rough_times import (
    rough_divided,
    rough_in_turn,
    rough_opposed,
    rough_parts,
    rough_together,
    totals,
)
from diffusionpipe.planner.search.sharded import numbers_of_blocks
from diffusionpipe.planner.search.two_sided import PairPartition
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.building.shapes import Pipe
from diffusionpipe.schedules.several.opposed import facing, in_turn, ordered, pipe_of
from diffusionpipe.units import Seconds

OPPOSED, TOGETHER, IN_TURN, DIVIDED = "opposed", "together", "in turn", "divided"
Starts = tuple[Sequence[int], Sequence[int]]
"""(first layers of the first backbone's stages, of the second's), each in forward order, counted in the backbone."""


def add_pairs(pool: Pool) -> None:
    """Add candidates for two backbones to the pool, of every kind at its best sizes, then improve the best ones."""
    judge = pool.judge
    ways: list[tuple[Seconds, int, PairPlace, _Kind]] = []
    for arrangement in arrangements(judge.setting.cluster):
        found = list(_places(judge, arrangement))
        # Few micro-batches often look fastest, and hold most.
        found = [place for place in found if judge.footprint.fits(_leanest(place))] or found
        for rough, kind in _kinds(judge, arrangement):
            ranked = sorted((rough(place), number) for number, place in enumerate(found))
            ways += [(time, len(ways), found[number], kind) for time, number in ranked[:NUM_PAIRS]]
    seen = set[object]()
    for time, _, place, kind in sorted(ways, key=lambda way: way[:2]):
        key = place.arrangement, kind
        if time <= pool.score or key not in seen:  # of each kind one, so that it can be compared
            seen.add(key)
            for candidate in kind(place):
                pool.add(pool.judged_of(candidate))
    for name in (OPPOSED, TOGETHER):
        alike = (one.candidate for one in pool.diverse() if one.candidate.schedule == name)
        best = dict.fromkeys((candidate.arrangement, candidate.counts) for candidate in alike)
        for arrangement, (first, second) in list(best)[:NUM_THOROUGH]:
            place = PairPlace(judge=judge, arrangement=arrangement, microbatches=(first, second))
            for candidate in _thorough(place, name):
                pool.add(pool.judged_of(candidate))
    for one in _best_of_arrangements(pool):
        pool.add(bucketed(pool, one))
    for one in _to_improve(pool):  # in buckets, a stage of few layers could not be made smaller
        whole = pool.judged_of(replace(one.candidate, buckets=1))
        pool.add(bucketed(pool, move_cuts(pool, whole)))


def _best_of_arrangements(pool: Pool) -> list[Judged]:
    """The best candidates of each kind and arrangement, which are then tried in buckets.

    Without buckets candidates whose gradient sums take long look worse than they are.
    """
    found: dict[object, list[Judged]] = {}
    for one in pool.diverse():
        found.setdefault((name_of(one.candidate), one.candidate.arrangement), []).append(one)
    return [one for alike in found.values() for one in alike[:NUM_OF_ARRANGEMENT]]


def _to_improve(pool: Pool) -> list[Judged]:
    """The candidates whose cuts are moved: the best of all, and the best of each kind in its best arrangements."""
    ranked = pool.diverse()
    kinds: dict[str, dict[Arrangement, Judged]] = {}
    for one in ranked:
        kinds.setdefault(name_of(one.candidate), {}).setdefault(one.candidate.arrangement, one)
    best = [one for of_kind in kinds.values() for one in list(of_kind.values())[:NUM_OF_KIND]]
    return list({one.candidate: one for one in (*ranked[:NUM_IMPROVED], *best)}.values())


def least_time(judge: Judge) -> Seconds:
    """A lower bound in seconds of an iteration of two backbones, in which all devices compute all the time.

    It is infinite if no layout cuts the batch.
    """
    times = [
        # `totals` are times on the fastest device.
        sum(m * time for m, time in totals(place)) * max(place.ground.speeds) / sum(place.ground.speeds)
        for arrangement in arrangements(judge.setting.cluster)
        for place in _places(judge, arrangement)
    ]
    return min(times, default=float("inf")) + judge.tables.frozen_seconds


def _places(judge: Judge, arrangement: Arrangement) -> Iterator[PairPlace]:
    """One `PairPlace` for each pair (micro-batches of the first backbone, of the second) that divides the batch."""
    setting, given = judge.setting, judge.setting.given
    rows, rest = divmod(setting.workload.batch, arrangement.data_parallel)
    _, border, end = judge.tables.borders
    if rest or arrangement.units > min(border, end - border):
        return
    if not given.allows(units=arrangement.units, data_parallel=arrangement.data_parallel):
        return
    counts = [n for n in range(1, min(rows, MAX_MICROBATCHES) + 1) if rows % n == 0]
    for first, second in product(counts, repeat=2):
        is_asked = given.microbatches is None or given.microbatches == first == second
        if arrangement.units * (first + second) <= PAIR_ACTIONS and is_asked:
            yield PairPlace(judge=judge, arrangement=arrangement, microbatches=(first, second))


def _opposed(place: PairPlace) -> Iterator[Candidate]:
    yield from _cut(place, OPPOSED)


def _together(place: PairPlace) -> Iterator[Candidate]:
    yield from _cut(place, TOGETHER)


def _cut(place: PairPlace, name: str) -> Iterator[Candidate]:
    """The candidates of a place with both backbones over all devices, whose cuts are found quickly.

    `name`: "opposed" or "together".
    """
    units = place.arrangement.units
    if units > MAX_UNEQUAL_UNITS:  # both at once takes the time of the fourth power of the layers
        yield from _ordered(place, name, _balanced(place, units, units), (1,) * units)
        return
    pairs = place.judge.pairs
    key = place.arrangement, place.microbatches, name
    if key not in pairs:
        question, loads = place.question((1,), is_opposed=name == OPPOSED), _loads(place, name)
        # The second one's loads are more even; which is better also depends on what the objective leaves out.
        pairs[key] = quick_pairs(question, loads)[:1] + first_pairs(question, loads, width=2, effort=QUICK_EFFORT)[:1]
    for pair in pairs[key]:
        yield from _ordered(place, name, _starts(place, name, pair), pair.replicas)


def _thorough(place: PairPlace, name: str) -> Iterator[Candidate]:
    """The candidates at a good place by a longer search: more partitions, the paper's formula, and replicas.

    `name`: "opposed" or "together".
    """
    if place.arrangement.units > MAX_UNEQUAL_UNITS:
        return
    pairs = place.judge.pairs
    key = place.arrangement, place.microbatches, name, WIDTH
    if key not in pairs:
        pairs[key] = _best(place, name)
    for pair in pairs[key]:
        if gcd(*pair.replicas) == 1:  # else it is another arrangement's
            yield from _ordered(place, name, _starts(place, name, pair), pair.replicas)


def _best(place: PairPlace, name: str) -> tuple[PairPartition, ...]:
    question = place.question(_replicas(place), is_opposed=name == OPPOSED)
    found = bounded_pairs(question, _loads(place, name), width=WIDTH)[:WIDTH]
    if name == OPPOSED:
        found += first_pairs(question, OppositePath(place.microbatches), width=2, effort=QUICK_EFFORT)[:1]
    return found


def _loads(place: PairPlace, name: str) -> PairObjective:
    return (OppositeLoads if name == OPPOSED else SameLoads)(place.microbatches)


def _starts(place: PairPlace, name: str, pair: PairPartition) -> Starts:
    """The first layers of both backbones' stages in forward order, from a pair that the dynamic program found.

    For one direction it counts the second backbone's layers from their end.
    """
    first, second = pair.starts
    turned = (0, *(place.num_layers[1] - start for start in reversed(second[1:])))
    return first, second if name == OPPOSED else turned


def _in_turn(place: PairPlace) -> Iterator[Candidate]:
    units = range(place.arrangement.units)
    starts = _balanced(place, len(units), len(units))
    pipes = _pipes(place, units, units)
    yield _candidate(place, IN_TURN, pipes, starts, (1,) * len(units), slack=None)


def _leanest(place: PairPlace) -> Candidate:
    """The candidate of a place that holds least memory: one backbone runs after the other, so one is held at a time."""
    (candidate,) = _in_turn(place)
    return candidate


def _divided(place: PairPlace) -> Iterator[Candidate]:
    """The candidates of a place that divide the devices between the backbones: as pipelines, or as copies on each part.

    Copies are left out if they cannot share the samples.
    """
    units = place.arrangement.units
    for count in sorted(range(1, units), key=lambda count: rough_parts(place, count))[:2]:
        pipes = _pipes(place, range(count), range(count, units))
        starts = _balanced(place, count, units - count)
        if all(len(one) <= layers for one, layers in zip(starts, place.num_layers, strict=True)):
            yield _candidate(place, DIVIDED, pipes, starts, (1,) * units, slack=None)
        # A worker for each backbone, and all others as its replicas.
        copies = _candidate(place, DIVIDED, _pipes(place, (0,), (1,)), ((0,), (0,)), (count, units - count), slack=None)
        # With two units the pipelines of one stage each are these copies.
        if units > 2 and place.judge.setting.owners == 1 and copies.divides(place.judge.setting.workload.batch):
            yield copies


_Kind: TypeAlias = Callable[[PairPlace], Iterator[Candidate]]
_Ways: TypeAlias = Mapping[str, tuple[Callable[[PairPlace], Seconds], _Kind]]
_KINDS: _Ways = {
    OPPOSED: (rough_opposed, _opposed),
    TOGETHER: (rough_together, _together),
    IN_TURN: (rough_in_turn, _in_turn),
    DIVIDED: (rough_divided, _divided),
}


def _kinds(judge: Judge, arrangement: Arrangement) -> Iterator[tuple[Callable[[PairPlace], Seconds], _Kind]]:
    """(function of the rough time, function of the candidates) of each way to run two backbones that is asked for.

    One device runs one backbone after the other. A way that is asked for is a way of several devices, unless there is
    only one device.
    """
    given = judge.setting.given.schedule
    if arrangement.units > 1:
        yield from (way for name, way in _KINDS.items() if given in (None, name))
    elif given is None or judge.setting.cluster.num_ranks == 1:
        yield _KINDS[IN_TURN]


def _balanced(place: PairPlace, first: int, second: int) -> Starts:
    """The first layers of both backbones' stages, cut into `first` and `second` stages of about equal times."""
    work = [place.work(backbone) for backbone in range(2)]
    steps = [[b - a for a, b in pairwise(own)] for own in work]
    return balanced_cuts(steps[0], first), balanced_cuts(steps[1], second)


def _pipes(place: PairPlace, first: Sequence[int], second: Sequence[int]) -> tuple[Pipe, Pipe]:
    """The pipes of both backbones; `first` and `second` are their workers in forward order."""
    names = [backbone.name for backbone in place.judge.setting.graph.backbones]
    m, n = place.microbatches
    return pipe_of(names[0], first, (1,) * m), pipe_of(names[1], second, (1,) * n, len(first))


def _ordered(place: PairPlace, name: str, starts: Starts, replicas: tuple[int, ...]) -> Iterator[Candidate]:
    """The candidates of a partition whose orders are listed at once, one for each slack of `SLACKS`.

    More slack is faster and holds more. Slacks with the same orders give one candidate.
    """
    blocks = range(len(replicas))
    pipes = _pipes(place, blocks, blocks)
    pipes = facing(*pipes) if name == OPPOSED else pipes
    # Slacks that give the same orders give one candidate.
    found = {candidate.orders: candidate for candidate in
             (_candidate(place, name, pipes, starts, replicas, slack=slack) for slack in SLACKS)}  # fmt: skip
    yield from (one for one in found.values() if one.divides(place.judge.setting.workload.batch))


def _candidate(
    place: PairPlace,
    name: str,
    pipes: tuple[Pipe, Pipe],
    starts: Starts,
    replicas: tuple[int, ...],
    *,
    slack: int | None,
) -> Candidate:
    """The candidate with orders listed for its own times; slack None: one backbone after the other."""
    times = _times(place, pipes, starts, replicas)
    border = place.judge.tables.borders[1]
    return Candidate(
        arrangement=place.arrangement,
        schedule=name,
        microbatches=lcm(*place.microbatches),
        starts=(*starts[0], *(border + start for start in starts[1])),
        replicas=replicas,
        orders=in_turn(name, pipes, times) if slack is None else ordered(name, pipes, times, slack=slack),
        sharded=place.judge.setting.sharded,
    )


def _times(place: PairPlace, pipes: tuple[Pipe, Pipe], starts: Starts, replicas: tuple[int, ...]) -> list[StageTimes]:
    found = []
    for backbone, (pipe, own) in enumerate(zip(pipes, starts, strict=True)):
        stops = (*own[1:], place.num_layers[backbone])
        for worker, first, stop in zip(pipe.workers, own, stops, strict=True):
            found.append(place.listed(backbone, first, stop, sum(replicas[:worker]), replicas[worker]))
    return found


def _replicas(place: PairPlace) -> tuple[int, ...]:
    """The numbers of replicas that can share a micro-batch of either backbone.

    Only 1 if the number of stages is given or if states are in parts.
    """
    setting = place.judge.setting
    if setting.given.stages is not None or setting.owners > 1:
        return (1,)
    return tuple(r for r in range(1, place.arrangement.units) if all(place.samples(b) % r == 0 for b in range(2)))


def roomy_pairs(judge: Judge) -> Iterator[Candidate]:
    """The candidate for two backbones with the least memory of each arrangement, whether it fits or not."""
    for arrangement in arrangements(judge.setting.cluster):
        found = sorted(_places(judge, arrangement), key=lambda place: sum(place.microbatches))
        for place in found[-1:]:  # the most micro-batches: the smallest hold least
            yield from _in_turn(place)


def sharded_pairs(judge: Judge) -> Iterator[Candidate]:
    """Candidates of sharded copies that train two backbones one after the other, most promising micro-batches first."""
    ranks, given = judge.setting.cluster.num_ranks, judge.setting.given
    if ranks == 1 or not judge.setting.may_shard or given.schedule is not None:
        return
    _, border, end = judge.tables.borders
    places = sorted(_places(judge, Arrangement(units=1, data_parallel=ranks)), key=rough_in_turn)
    alone = [_leanest(place) for place in places]
    in_memory = [one for one in alone if _may_fit_in_parts(judge, one)]
    for one in (in_memory or alone)[:NUM_PAIRS]:
        for buckets in numbers_of_blocks(min(border, end - border)):
            if buckets * sum(one.counts) <= MAX_SHARDED_FORWARDS:
                yield replace(one, buckets=buckets, sharded=Sharded.ALL)


def _may_fit_in_parts(judge: Judge, copy: Candidate) -> bool:
    """Whether the memory that each copy holds whole fits on every device; memory in parts is not counted."""
    (use,) = judge.footprint.uses(copy)
    return use.having(Trait.WHOLE) <= min(judge.tables.ground(copy.arrangement).memories)

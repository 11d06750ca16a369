"""Adds candidates of a place (arrangement of ranks and number of micro-batches), and better ones made from these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering import Placing
from diffusionpipe.planner.assembly.structure import generated
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.chains import is_own, replicas_of
from diffusionpipe.planner.search.constants import (
    BETTER,
    BUCKETS,
    CHAIN,
    ENOUGH,
    GAINED,
    HOPELESS,
    MAX_BUCKETED_FORWARDS,
    MAX_MICROBATCHES,
    MAX_UNEQUAL_UNITS,
    NUM_IMPROVED,
    NUM_ORDERED,
    ORDER_SECONDS,
    PROMISING,
)
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.objectives import CriticalPath
from diffusionpipe.planner.search.placed import ordered, ordered_as, placed
from diffusionpipe.planner.search.places import least_time
from diffusionpipe.planner.search.pool import Judged, Pool
from diffusionpipe.planner.search.recut import recut
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.branches import GRAPHPIPE
from diffusionpipe.schedules.building.shapes import linear
from diffusionpipe.schedules.traits import is_chain
from diffusionpipe.units import Bytes, Seconds

Move = Mapping[int, int]
"""Cut -> the number of layers by which it moves; negative: to the front. Cut i is the start of stage i."""


def add_place(pool: Pool, arrangement: Arrangement, microbatches: int, replicas: tuple[int, ...] = (1,)) -> None:
    """Add candidates of one place to the pool: partitions of the dynamic program, and of equal times, as 1F1B.

    The best partition of each choice of replicas and the one of equal times are also judged with the other schedules.
    If a schedule is given, it is the only one. If nothing fits because every rank holds the encoders, some ranks hold
    them for all. `replicas`: the numbers of replicas that a stage may have.
    """
    judge = pool.judge
    if not judge.setting.given.allows_chains:
        for candidate in placed(judge, arrangement, microbatches):
            pool.add(pool.judged_of(candidate))
        return
    # The dearest stage is busy all the time, so a better partition has a cheaper one.
    limit = max(pool.score / microbatches, 2 * _even_share(judge, arrangement, microbatches))

    def cuts(hosts: tuple[int, ...] | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        objective = CriticalPath(microbatches)
        partitions = judge.questions.partitions(
            arrangement, microbatches, objective, replicas=replicas, limit=limit, hosts=hosts
        )
        return [(partition.starts, partition.replicas) for partition in partitions]

    found = cuts(None)
    if not found:
        for hosts in pool.sets_of_hosts(arrangement):
            add_cuts(pool, arrangement, microbatches, cuts(hosts), hosts=hosts)
    if replicas == (1,) and 1 < arrangement.units <= judge.tables.num_layers:
        units = arrangement.units
        found.append((judge.cuts(arrangement, microbatches, linear(units)), (1,) * units))
    add_cuts(pool, arrangement, microbatches, found)


def add_cuts(
    pool: Pool,
    arrangement: Arrangement,
    microbatches: int,
    found: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    hosts: tuple[int, ...] | None = None,
) -> None:
    """Add candidates with these (first layers, replicas) to the pool, the best of them with other schedules too.

    `found` has the best partition first. `hosts`: the units that hold the frozen layers; None for all.
    """
    schedule = pool.judge.setting.given.schedule or CHAIN
    known = set[tuple[int, ...]]()
    for index, (starts, counts) in enumerate(found):
        candidate = Candidate(
            arrangement=arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=starts,
            replicas=counts,
            hosts=hosts,
            sharded=pool.judge.setting.sharded,
        )
        candidate = recut(pool.judge, candidate)
        if not candidate.divides(pool.judge.setting.workload.batch) or not is_own(pool, arrangement, counts):
            continue
        one = pool.judged_of(candidate)
        pool.add(one)
        if len(starts) == 1:  # all that data parallelism can be improved in
            pool.add(bucketed(pool, one))
        elif counts not in known or index == len(found) - 1:  # the last one is the cut of equal times (`add_place`)
            known.add(counts)
            add_schedules(pool, one)


def improve(pool: Pool, places: Sequence[tuple[Arrangement, int]] = ()) -> None:
    """Add better candidates to the pool, made from its best ones.

    Changes are unequal replicas, moved cuts, buckets, other schedules, several stages on a worker and searched orders.

    `places`, most promising first, get several stages on a worker too: few micro-batches rank low as 1F1B.
    """
    given = pool.judge.setting.given
    if given.allows_chains:
        _add_unequal(pool)
    for one in pool.diverse()[:NUM_IMPROVED]:
        if one.score > HOPELESS * pool.score:
            break
        moved = bucketed(pool, move_cuts(pool, one))
        pool.add(moved)
        add_schedules(pool, moved)
    if given.schedule is None:
        best_places = _waiting_places(pool, NUM_IMPROVED)
        for place in dict.fromkeys([*best_places, *places[:NUM_IMPROVED]]):
            found = _of_place(pool, *place)
            if found and _may_gain(pool, found[0]):
                own = found[0].score
                # A place that ranks low as 1F1B must come near the best of all, not only near its own 1F1B.
                limit = own if place in best_places else min(own, GAINED * pool.score)
                _add_placed(pool, *place, limit, GAINED * limit)
        for arrangement, microbatches in _waiting_places(pool, NUM_ORDERED):
            _add_ordered(pool, arrangement, microbatches)
    if given.microbatches is None:
        _add_neighbours(pool)


def _add_unequal(pool: Pool) -> None:
    """Add candidates with unequal replicas to the pool, at the best places.

    These are the best of all, and the best place of each other arrangement that may still win. The module `chains` has
    asked for the cuts that are best for 1F1B. Cuts with a shorter critical path are better for schedules with more
    micro-batches under way.
    """
    best, tried = set(_best_places(pool, NUM_IMPROVED)), set[Arrangement]()
    for one in pool.ranked():
        place = arrangement, microbatches = one.candidate.arrangement, one.candidate.microbatches
        is_due = place in best or (arrangement not in tried and _may_gain(pool, one))
        best.discard(place)  # each place once
        if is_due and 2 < arrangement.units <= MAX_UNEQUAL_UNITS:
            replicas = replicas_of(pool.judge, arrangement, microbatches)
            if len(replicas) > 1:
                tried.add(arrangement)
                add_place(pool, arrangement, microbatches, replicas)


def _best_places(pool: Pool, count: int) -> list[tuple[Arrangement, int]]:
    """The places, (arrangement, micro-batches), of the best candidates, best first, at most `count`."""
    return list(dict.fromkeys((one.candidate.arrangement, one.candidate.microbatches) for one in pool.ranked()))[:count]


def _waiting_places(pool: Pool, count: int) -> list[tuple[Arrangement, int]]:
    """The best places, (arrangement, micro-batches), whose devices wait and that may still win, at most `count`.

    Copies of the model never wait, so places are ranked by their best pipelines.
    """
    best: dict[tuple[Arrangement, int], Judged] = {}
    for one in pool.ranked():
        if not one.candidate.is_copy:
            best.setdefault((one.candidate.arrangement, one.candidate.microbatches), one)
    return [place for place, one in best.items() if _may_gain(pool, one)][:count]


def add_schedules(pool: Pool, one: Judged) -> None:
    """Add the candidate with each other schedule of one stage on each worker to the pool, if that is faster."""
    if pool.judge.setting.given.schedule is not None or not is_chain(one.candidate.schedule):
        return
    # At most, another schedule waits at neither end of the pipeline: with few micro-batches it gains most.
    count, ramp = one.candidate.microbatches, one.candidate.workers - 1
    if one.score > max(HOPELESS, (count + ramp) / count) * pool.score:
        return
    alike = set[tuple[Seconds, Bytes]]()
    limit = min(one.score, PROMISING * pool.score) * BETTER
    for name in sorted(set(REGISTRY) - {one.candidate.schedule}):
        if is_chain(name) and pool.judge.setting.allows_family(name):
            # An estimate ends early at its limit, and one that is as fast as the candidate must be whole.
            variant = pool.judged_of(replace(one.candidate, schedule=name, orders=None), limit=limit / BETTER**2)
            key = variant.score, variant.estimate.overflow
            # Families agree at many sizes.
            if (variant.score < limit or _waits_less(pool, variant, one)) and key not in alike:
                alike.add(key)
                pool.add(variant)
                if not variant.fits and variant.score < pool.score * BETTER:
                    _add_relieved(pool, variant.candidate)


def _waits_less(pool: Pool, one: Judged, than: Judged, *, slack: float = 0.0) -> bool:
    """Whether `one` has clearly shorter waits to fill than `than`, and takes no longer with fills by the estimate.

    `slack`: the part by which `one` may take longer, as chunks of frozen work have other sizes.
    """
    is_alike = pool.is_filled and one.score <= than.score * (1 + slack)
    return is_alike and one.estimate.pipeline < than.estimate.pipeline * (1 - ENOUGH)


def _add_relieved(pool: Pool, candidate: Candidate) -> None:
    """Add the candidate to the pool with its cuts moved by a layer at a time until it fits in memory, if it is fastest.

    Its cuts were found for 1F1B; a schedule that holds more may fit with other cuts that are as fast.
    """
    footprint = pool.judge.footprint

    def lacking(other: Candidate) -> Bytes:
        return footprint.overflow(other, footprint.held(pool.with_hosts(other)))

    least, fitting = lacking(candidate), list[Candidate]()
    while not fitting:
        before = least
        for starts in _moved(pool.judge, candidate.starts, _single_moves(candidate)):
            moved = recut(pool.judge, candidate, starts=starts)
            lacks = lacking(moved)
            if lacks <= 0:
                fitting.append(moved)
            elif lacks < least:
                candidate, least = moved, lacks
        if least == before:
            break
    for moved in fitting:
        one = pool.judged_of(moved, limit=pool.score)
        if one.fits and one.score < pool.score * BETTER:
            pool.add(one)


def _add_placed(
    pool: Pool, arrangement: Arrangement, microbatches: int, limit: Seconds, hopeful: Seconds = float("inf")
) -> None:
    """Add candidates with several stages on a worker to the pool, also with moved cuts, if they beat `limit`.

    They are cut by time at first, which is far from the best if messages are slow or layers few. Cuts are moved for the
    best of the candidates that are cut alike, if it takes less than `hopeful` seconds before, and then serve all.
    """
    alike: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in placed(pool.judge, arrangement, microbatches):
        if pool.judge.footprint.fits(pool.with_hosts(candidate)):
            alike.setdefault(candidate.starts, []).append(candidate)
    for starts, candidates in alike.items():
        found = [pool.judged_of(candidate, limit=hopeful) for candidate in candidates]
        best = min(found, key=lambda one: one.score)
        if best.score >= hopeful:
            continue
        moved = move_cuts(pool, best).candidate.starts
        if moved != starts:
            found += [pool.judged_of(replace(one, starts=moved), limit=limit) for one in candidates]
        for one in found:
            if one.fits and one.score < limit * BETTER:
                pool.add(one)


def add_crowded(pool: Pool, places: Sequence[tuple[Arrangement, int]]) -> None:
    """Add candidates that hold less memory to the pool, at the first places where no candidate fits so far.

    These are schedules with several stages on a worker, and chains with unequal replicas. With few micro-batches such a
    chain may be slow as 1F1B, and so left out before, but fast with a split backward.
    """
    if pool.judge.setting.given.schedule is not None:
        return
    taken = {(one.candidate.arrangement, one.candidate.microbatches) for one in pool.judged.values() if one.fits}
    crowded = [place for place in places if place[0].units > 1 and place not in taken]
    for arrangement, microbatches in crowded[:NUM_IMPROVED]:
        _add_placed(pool, arrangement, microbatches, GAINED * pool.score)
        if 2 < arrangement.units <= MAX_UNEQUAL_UNITS:
            replicas = replicas_of(pool.judge, arrangement, microbatches)
            if len(replicas) > 1:
                add_place(pool, arrangement, microbatches, replicas)


def _add_ordered(pool: Pool, arrangement: Arrangement, microbatches: int) -> None:
    """Add candidates with orders that are searched for this place alone to the pool, if they are better."""
    own = _of_place(pool, arrangement, microbatches)
    if own[0].score > HOPELESS * pool.score or not _may_gain(pool, own[0]):
        return
    limit = own[0].score * BETTER
    for candidate in ordered(pool.judge, [one.candidate for one in own], seconds=ORDER_SECONDS):
        one = move_cuts(pool, pool.judged_of(candidate))
        if one.fits and (one.score < limit or _waits_less(pool, one, own[0], slack=ENOUGH)):
            pool.add(one)


def _add_neighbours(pool: Pool) -> None:
    """Add the best candidate with the next smaller and larger numbers of micro-batches to the pool, while that helps.

    Buckets and searched orders, by which it may be the best, have been tried at few places.
    """
    best = next(iter(pool.ranked()), None)
    if best is None or best.score > HOPELESS * pool.score:
        return
    batch, seen = pool.judge.setting.workload.batch, {best.candidate.microbatches}
    counts = [n for n in range(1, MAX_MICROBATCHES + 1) if replace(best.candidate, microbatches=n).divides(batch)]
    while True:
        own, found = best.candidate, best
        place = counts.index(own.microbatches)
        for count in counts[max(0, place - 1) : place + 2]:
            if count in seen:
                continue
            seen.add(count)
            if least_time(pool.judge, own.arrangement, count) >= found.score:
                continue
            candidate = _with_microbatches(pool, own, count)
            one = bucketed(pool, move_cuts(pool, pool.judged_of(candidate))) if candidate else best
            if one.fits and one.score < found.score * BETTER:
                found = one
        if found is best:
            return
        pool.add(found)
        best = found


def _with_microbatches(pool: Pool, candidate: Candidate, count: int) -> Candidate | None:
    """The candidate with another number of micro-batches; None if its schedule cannot have this number.

    Orders that were searched are searched for the new number.
    """
    if candidate.schedule == GRAPHPIPE:
        return recut(pool.judge, candidate, microbatches=count, buckets=1)
    if candidate.orders:
        placing = Placing(candidate.schedule.removeprefix("search-"))
        own = candidate.arrangement, count, placing, candidate.starts
        return ordered_as(pool.judge, *own, seconds=ORDER_SECONDS)
    other = replace(candidate, microbatches=count, buckets=1)
    try:
        generated(other.schedule, other.workers, count, 1)
    except ConfigError:  # the family cannot do so many
        return None
    return other


def _of_place(pool: Pool, arrangement: Arrangement, microbatches: int) -> list[Judged]:
    place = (arrangement, microbatches)
    return [one for one in pool.ranked() if (one.candidate.arrangement, one.candidate.microbatches) == place]


def _may_gain(pool: Pool, one: Judged) -> bool:
    """Whether another order may make a candidate the best: its devices wait, and its bound is below the best score."""
    candidate, judge = one.candidate, pool.judge
    if candidate.arrangement.units == 1 or candidate.hosts is not None:
        return False
    # All devices at work all the time, the frozen part included: with other cuts unequal devices may work less.
    least = least_time(judge, candidate.arrangement, candidate.microbatches)
    return (
        one.score > least * (1 + ENOUGH)
        and least < pool.score
        and judge.tables.num_layers >= candidate.arrangement.units
    )


def _even_share(judge: Judge, arrangement: Arrangement, microbatches: int) -> Seconds:
    """The seconds that each unit would compute for one micro-batch if layers could be cut anywhere."""
    sums = judge.tables.table.sums(judge.tables.unit_samples(arrangement, microbatches), microbatches)
    return (sums.forward[-1] + sums.backward[-1]) / sum(judge.tables.ground(arrangement).speeds)


def move_cuts(pool: Pool, one: Judged) -> Judged:
    """The candidate with its cuts moved by a layer at a time, for as long as that makes it faster; else itself.

    If no single move helps, two cuts are moved so that every worker keeps its number of layers.
    """
    before: tuple[int, ...] = ()  # cuts that the last move left: they are worse
    while True:
        found = one
        for moves in (_single_moves(one.candidate), _balanced_moves(pool.judge, one.candidate)):
            for starts in _moved(pool.judge, one.candidate.starts, moves):
                if starts == before:
                    continue
                moved = pool.judged_of(recut(pool.judge, one.candidate, starts=starts), limit=found.score * BETTER)
                if moved.fits and moved.score < found.score * BETTER:
                    found = moved
            if found is not one:
                break
        if found is one:
            return one
        one, before = found, one.candidate.starts


def _single_moves(candidate: Candidate) -> Iterator[Move]:
    """Each move of a single cut by one layer, towards the front or the back."""
    for cut in range(1, len(candidate.starts)):
        yield from ({cut: -1}, {cut: 1})


def _balanced_moves(judge: Judge, candidate: Candidate) -> Iterator[Move]:
    """Each move of two cuts by one layer after which every worker has as many layers as before.

    A worker with several stages gets a layer more in one of them and a layer less in another.
    """
    blocks = judge.footprint.blocks(candidate)
    # A later cut gives a layer to the stage before it: its workers get one more, the next stage's workers one less.
    gains = [tuple((cut - 1 in own) - (cut in own) for own in blocks) for cut in range(1, len(candidate.starts))]
    for (cut, gain), (other, its_gain) in combinations(enumerate(gains, 1), 2):
        for step in (-1, 1):
            if any(gain) and gain == tuple(-step * one for one in its_gain):
                yield from ({cut: -1, other: -step}, {cut: 1, other: step})


def _moved(judge: Judge, starts: tuple[int, ...], moves: Iterable[Move]) -> Iterator[tuple[int, ...]]:
    """The first layers of all stages after each move, but for moves that empty a stage or move a backbone's end."""
    borders, num_layers = judge.tables.borders, judge.tables.num_layers
    for move in moves:
        found = tuple(start + move.get(stage, 0) for stage, start in enumerate(starts))
        is_free = not any(starts[cut] in borders for cut in move)
        if is_free and all(first < stop for first, stop in pairwise((*found, num_layers))):
            yield found


def bucketed(pool: Pool, one: Judged) -> Judged:
    """The candidate with the number of buckets that is fastest by the estimate; the fewest of equally fast ones."""
    if one.candidate.arrangement.data_parallel == 1 and max(one.candidate.replicas) == 1:
        return one  # no gradient is summed
    # Only data parallelism has as many buckets as layers: with several stages each has fewer layers.
    for buckets in (*BUCKETS, pool.judge.tables.num_layers):
        if _has_layers(pool.judge, one.candidate, buckets):
            variant = pool.judged_of(replace(one.candidate, buckets=buckets), limit=one.score * BETTER)
            if variant.score < one.score * BETTER:
                one = variant
    return one


def _has_layers(judge: Judge, candidate: Candidate, buckets: int) -> bool:
    if len(candidate.starts) * buckets * candidate.microbatches > MAX_BUCKETED_FORWARDS:
        return False
    stops = (*candidate.starts[1:], judge.tables.num_layers)
    return all(stop - start >= buckets for start, stop in zip(candidate.starts, stops, strict=True))

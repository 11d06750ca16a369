"""The best plan among many: stages, replicas, data parallelism, micro-batches, schedule, and what crosses nodes.

    1. every (arrangement of ranks, number of micro-batches), in the order of a lower bound of its iteration time
    2. for each the dynamic program's partitions, judged by a quick simulation; those whose lower bound is worse than
       what is found already are never looked at, but for the most promising of each arrangement
    3. the best ones improved: cuts moved, gradients in buckets, other schedules, unequal replicas
    4. the best of these made into plans and simulated in full, with memory; the winner is the fastest that fits

Whether frozen work is filled into bubbles changes what is best, so both are judged together: in steps 2 and 3 by
what a good filling reaches, in step 4 by the filler's own work. No step depends on chance or on the clock.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.arrangement import Arrangement, arrangements
from diffusionpipe.planner.build import Filler
from diffusionpipe.planner.candidates import Candidate, Estimate, Judge
from diffusionpipe.planner.encoders import host_sets
from diffusionpipe.planner.given import is_chain
from diffusionpipe.planner.objectives import CriticalPath
from diffusionpipe.planner.partition import balanced_cuts
from diffusionpipe.planner.proposal import Proposal, propose
from diffusionpipe.planner.sharded import with_sharded
from diffusionpipe.planner.stage_costs import Setting
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.units import Bytes, Seconds

NUM_IMPROVED = 8
NUM_FINALISTS = 6
MAX_MICROBATCHES = 128
MAX_UNEQUAL_UNITS = 8
MAX_ATTEMPTS = 4
"""Where no finalist fits in memory after all, so many times as many are looked at."""
BUCKETS = (2, 4, 8, 16, 32)
MAX_BUCKETED_FORWARDS = 1024
"""Stages x buckets x micro-batches of what is tried in buckets."""
HEAVY = 1 / 32
"""Encoders of this part of a device's memory may be kept off some of the ranks."""
TRUST = 1.02
"""An estimate this many times the best full simulation is not looked into any more."""
SLACK = 2.0
"""Candidates this many times slower than the best are still listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate with its estimate."""

    candidate: Candidate
    estimate: Estimate
    score: Seconds
    """What it is ranked by: the iteration time with the frozen work, filled or serial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search found."""

    finalists: tuple[tuple[Candidate, Proposal], ...]
    """Simulated in full, fastest first; those that do not fit in memory last."""
    judged: tuple[Judged, ...]
    """All others that were estimated and come near, best first; each arrangement and schedule once."""
    num_estimated: int
    is_filled: bool

    @property
    def winner(self) -> tuple[Candidate, Proposal] | None:
        """The fastest that fits; None where nothing does."""
        fitting = [one for one in self.finalists if one[1].overflow <= 0]
        return fitting[0] if fitting else None


@dataclass(slots=True)
class _Best:
    """The candidates judged so far."""

    judged: dict[Candidate, Judged] = field(default_factory=dict)
    score: Seconds = float("inf")
    """Of the best that fits."""

    def add(self, one: Judged) -> None:
        self.judged[one.candidate] = one
        if one.estimate.overflow <= 0:
            self.score = min(self.score, one.score)

    def ranked(self) -> list[Judged]:
        """Those that fit, best first; ties by the order in which they were found."""
        return sorted((j for j in self.judged.values() if j.estimate.overflow <= 0), key=lambda j: j.score)


def search(
    setting: Setting,
    *,
    filler: Filler | None = None,
    num_finalists: int = NUM_FINALISTS,
    units: Collection[int] | None = None,
) -> Search:
    """The best plans of a model on a cluster; `winner` is None where nothing fits in memory.

    `units` are the ranks that a pipeline may have, any by default; 1 is data parallelism.

    Raises:
        ConfigError: no way of using all ranks cuts the batch at whole samples.
    """
    judge = Judge(setting=setting)
    best = _Best()
    is_filled = filler is not None
    places = sorted(_places(judge, units), key=lambda place: (place[0], place[1].units, place[1].adjacent, place[2]))
    if not places:
        raise ConfigError(_uncuttable(setting))
    seen: set[Arrangement] = set()
    for bound, arrangement, microbatches in places:
        if bound <= best.score or arrangement not in seen:  # of each arrangement one, so that it can be compared
            known = len(best.judged)
            _add_partitions(judge, best, arrangement, microbatches, is_filled=is_filled)
            # Copies of the model that do not fit at once may fit in parts.
            if arrangement.units > 1 or len(best.judged) > known:
                seen.add(arrangement)
    _improve(judge, best, is_filled=is_filled)
    finalists = _finalists(setting, best, filler, num_finalists)
    if not any(proposal.overflow <= 0 and candidate.hosts is None for candidate, proposal in finalists):
        _add_tight(judge, best, [(arrangement, count) for _, arrangement, count in places], is_filled=is_filled)
        finalists = _finalists(setting, best, filler, num_finalists)
    ranked = _diverse(best.ranked())
    finalists = with_sharded(setting, finalists, filler)
    finalists.sort(key=lambda pair: (pair[1].overflow > 0, pair[1].step))
    taken = {candidate for candidate, _ in finalists}
    return Search(
        finalists=tuple(finalists),
        judged=tuple(one for one in ranked if one.candidate not in taken and one.score <= SLACK * best.score),
        num_estimated=len(best.judged),
        is_filled=is_filled,
    )


def _finalists(
    setting: Setting, best: _Best, filler: Filler | None, num_finalists: int
) -> list[tuple[Candidate, Proposal]]:
    """The best candidates simulated in full, in the order of their estimates."""
    ranked = _diverse(best.ranked())
    finalists: list[tuple[Candidate, Proposal]] = []
    fastest = float("inf")
    for one in ranked[: MAX_ATTEMPTS * num_finalists]:
        is_enough = len(finalists) >= num_finalists and fastest < float("inf")
        if is_enough or one.score >= TRUST * fastest:
            break
        proposal = propose(setting, one.candidate.layout(setting), filler)
        finalists.append((one.candidate, proposal))
        if proposal.overflow <= 0:
            fastest = min(fastest, proposal.step)
    # Filling never does quite as well as estimated, but for copies of the model: they may win from behind.
    copies = next((j for j in ranked if len(j.candidate.starts) == 1 and j.score < TRUST * fastest), None)
    if copies and all(candidate != copies.candidate for candidate, _ in finalists):
        finalists.append((copies.candidate, propose(setting, copies.candidate.layout(setting), filler)))
    return finalists


def _add_tight(judge: Judge, best: _Best, places: Sequence[tuple[Arrangement, int]], *, is_filled: bool) -> None:
    """Judge what needs less memory: encoders on some ranks alone, the activations of one micro-batch at a time."""
    given = judge.setting.given.schedule
    for arrangement, microbatches in places:
        if not 1 < arrangement.units <= MAX_UNEQUAL_UNITS:
            continue
        may_choose = is_filled and judge.frozen_bytes > 0
        sets = host_sets(judge.ground(arrangement).memories) if may_choose else ()
        for hosts in sets:
            partitions = judge.partitions(arrangement, microbatches, CriticalPath(microbatches), hosts=hosts)
            cuts = [(partition.starts, partition.replicas) for partition in partitions]
            _add_cuts(judge, best, arrangement, microbatches, cuts, is_filled=is_filled, hosts=hosts)
        anywhere: tuple[tuple[int, ...] | None, ...] = (None, *sets)
        for some in anywhere if given in (None, "sequential") else ():
            # Micro-batches pass one after the other, so what counts is the way of one of them.
            partitions = judge.partitions(arrangement, microbatches, CriticalPath(1), in_flight=1, hosts=some)
            for partition in partitions:
                candidate = Candidate(
                    arrangement=arrangement,
                    schedule="sequential",
                    microbatches=microbatches,
                    starts=partition.starts,
                    replicas=partition.replicas,
                    hosts=some,
                )
                if judge.fits_evenly(candidate):
                    best.add(_judged(judge, candidate, is_filled=is_filled))


def least_overflow(setting: Setting) -> tuple[Candidate, Proposal] | None:
    """Of the layouts with the most stages, and of data parallelism, the one that misses the memory by least."""
    judge = Judge(setting=setting)
    found: list[Judged] = []
    for _, arrangement, microbatches in _places(judge):
        partitions = judge.partitions(
            arrangement, microbatches, CriticalPath(microbatches), width=2, ignores_memory=True
        )
        for partition in partitions:
            candidate = Candidate(
                arrangement=arrangement,
                schedule=setting.given.schedule or "1f1b",
                microbatches=microbatches,
                starts=partition.starts,
                replicas=partition.replicas,
            )
            estimate = judge.estimate(candidate)
            found.append(Judged(candidate=candidate, estimate=estimate, score=estimate.serial))
    if not found:
        return None
    best = min(found, key=lambda one: (one.estimate.overflow, one.score))
    return best.candidate, propose(setting, best.candidate.layout(setting))


def _places(judge: Judge, units: Collection[int] | None = None) -> Iterator[tuple[Seconds, Arrangement, int]]:
    """(lower bound, arrangement, micro-batches) wherever the batch can be cut."""
    batch, given = judge.setting.workload.batch, judge.setting.given
    for arrangement in arrangements(judge.setting.cluster):
        if units is not None and arrangement.units not in units:
            continue
        if not given.allows(units=arrangement.units, data_parallel=arrangement.data_parallel):
            continue
        if arrangement.units > judge.num_layers or batch % arrangement.data_parallel:
            continue
        rows = batch // arrangement.data_parallel
        counts = [given.microbatches] if given.microbatches else range(1, min(rows, MAX_MICROBATCHES) + 1)
        for microbatches in counts:
            if rows % microbatches == 0:
                yield _lower_bound(judge, arrangement, microbatches), arrangement, microbatches


def _lower_bound(judge: Judge, arrangement: Arrangement, microbatches: int) -> Seconds:
    """No partition into stages of one unit each takes less time, with the frozen work.

    One micro-batch passes all stages and comes back, and the stage with the most work does that for all the others.
    """
    sums = judge.table.sums(judge.unit_samples(arrangement, microbatches))
    whole = sums.forward[-1] + sums.backward[-1]
    speeds = judge.ground(arrangement).speeds
    ramp = whole / max(speeds) + (microbatches - 1) * whole / sum(speeds)
    rows = -(-judge.setting.workload.batch // judge.setting.cluster.num_ranks)
    frozen = arrangement.units * judge.encoding(rows)
    return max(ramp, (microbatches * whole + frozen) / sum(speeds))


def _add_partitions(
    judge: Judge,
    best: _Best,
    arrangement: Arrangement,
    microbatches: int,
    *,
    is_filled: bool,
    replicas: tuple[int, ...] = (1,),
) -> None:
    """Judge the dynamic program's partitions and that of equal times, as 1F1B: no schedule needs less memory.

    The best one and that of equal times are also judged with the other schedules. If one is given, it is the only one.
    Where nothing fits because every rank holds the encoders, some ranks hold them for all.
    """
    # The dearest stage is busy all the time: whoever is to be better than the best has a cheaper one.
    limit = max(best.score / microbatches, 2 * _even_share(judge, arrangement, microbatches))

    def cuts(hosts: tuple[int, ...] | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        objective = CriticalPath(microbatches)
        partitions = judge.partitions(arrangement, microbatches, objective, replicas=replicas, limit=limit, hosts=hosts)
        return [(partition.starts, partition.replicas) for partition in partitions]

    found = cuts(None)
    if not found and is_filled and judge.frozen_bytes >= HEAVY * max(judge.ground(arrangement).memories):
        for hosts in host_sets(judge.ground(arrangement).memories):
            _add_cuts(judge, best, arrangement, microbatches, cuts(hosts), is_filled=is_filled, hosts=hosts)
    if arrangement.units > 1 and replicas == (1,):
        sums = judge.table.sums(judge.unit_samples(arrangement, microbatches))
        found.append((balanced_cuts(sums.steps(), arrangement.units), (1,) * arrangement.units))
    _add_cuts(judge, best, arrangement, microbatches, found, is_filled=is_filled)


def _add_cuts(
    judge: Judge,
    best: _Best,
    arrangement: Arrangement,
    microbatches: int,
    found: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    is_filled: bool,
    hosts: tuple[int, ...] | None = None,
) -> None:
    """Judge partitions: first layers and replicas of their stages."""
    schedule = judge.setting.given.schedule or "1f1b"
    for index, (starts, counts) in enumerate(found):
        candidate = Candidate(
            arrangement=arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=starts,
            replicas=counts,
            hosts=hosts,
        )
        # Replicas with a common divisor are another arrangement's.
        if not judge.fits_evenly(candidate) or gcd(*counts) != 1:
            continue
        one = _judged(judge, candidate, is_filled=is_filled)
        best.add(one)
        if arrangement.units == 1:  # all that data parallelism can be improved in
            best.add(_bucketed(judge, one, is_filled=is_filled))
        elif index in (0, len(found) - 1):
            _add_schedules(judge, best, one, is_filled=is_filled)


def _add_schedules(judge: Judge, best: _Best, one: Judged, *, is_filled: bool) -> None:
    """The other families of schedules that put one stage on each worker, where they are better."""
    if judge.setting.given.schedule is not None:
        return
    alike = set[tuple[Seconds, Bytes]]()
    for name in sorted(set(REGISTRY) - {one.candidate.schedule}):
        if is_chain(name):
            variant = _judged(judge, replace(one.candidate, schedule=name), is_filled=is_filled)
            key = variant.score, variant.estimate.overflow
            if variant.score < one.score * (1 - 1e-9) and key not in alike:  # families agree at many sizes
                alike.add(key)
                best.add(variant)


def _even_share(judge: Judge, arrangement: Arrangement, microbatches: int) -> Seconds:
    """What each unit would compute for one micro-batch if layers could be cut anywhere."""
    sums = judge.table.sums(judge.unit_samples(arrangement, microbatches))
    return (sums.forward[-1] + sums.backward[-1]) / sum(judge.ground(arrangement).speeds)


def _judged(judge: Judge, candidate: Candidate, *, is_filled: bool) -> Judged:
    estimate = judge.estimate(candidate)
    return Judged(candidate=candidate, estimate=estimate, score=estimate.filled if is_filled else estimate.serial)


def _improve(judge: Judge, best: _Best, *, is_filled: bool) -> None:
    """Unequal replicas, moved cuts, buckets and other schedules for the best."""
    places = dict.fromkeys((j.candidate.arrangement, j.candidate.microbatches) for j in best.ranked())
    for arrangement, microbatches in list(places)[:NUM_IMPROVED]:
        if 2 < arrangement.units <= MAX_UNEQUAL_UNITS and judge.setting.given.stages is None:
            rows = judge.setting.workload.batch // (arrangement.data_parallel * microbatches)
            replicas = tuple(r for r in range(1, arrangement.units) if rows % r == 0)
            _add_partitions(judge, best, arrangement, microbatches, is_filled=is_filled, replicas=replicas)
    for one in _diverse(best.ranked())[:NUM_IMPROVED]:
        moved = _bucketed(judge, _move_cuts(judge, one, is_filled=is_filled), is_filled=is_filled)
        best.add(moved)
        _add_schedules(judge, best, moved, is_filled=is_filled)


def _move_cuts(judge: Judge, one: Judged, *, is_filled: bool) -> Judged:
    """The candidate with its cuts moved by a layer at a time for as long as that helps."""
    num_layers = judge.num_layers
    while True:
        found = one
        for stage in range(1, len(one.candidate.starts)):
            for step in (-1, 1):
                starts = list(one.candidate.starts)
                starts[stage] += step
                if not starts[stage - 1] < starts[stage] < (*starts, num_layers)[stage + 1]:
                    continue
                moved = _judged(judge, replace(one.candidate, starts=tuple(starts)), is_filled=is_filled)
                if moved.estimate.overflow <= 0 and moved.score < found.score * (1 - 1e-9):
                    found = moved
        if found is one:
            return one
        one = found


def _bucketed(judge: Judge, one: Judged, *, is_filled: bool) -> Judged:
    """The candidate with the number of buckets that is best, the fewest of equally good ones."""
    if one.candidate.arrangement.data_parallel == 1 and max(one.candidate.replicas) == 1:
        return one  # no gradient is summed
    for buckets in (*BUCKETS, judge.num_layers):
        if _has_layers(judge, one.candidate, buckets):
            variant = _judged(judge, replace(one.candidate, buckets=buckets), is_filled=is_filled)
            if variant.score < one.score * (1 - 1e-9):
                one = variant
    return one


def _has_layers(judge: Judge, candidate: Candidate, buckets: int) -> bool:
    if len(candidate.starts) * buckets * candidate.microbatches > MAX_BUCKETED_FORWARDS:
        return False
    stops = (*candidate.starts[1:], judge.num_layers)
    return all(stop - start >= buckets for start, stop in zip(candidate.starts, stops, strict=True))


def _diverse(ranked: Sequence[Judged]) -> list[Judged]:
    """The best of each arrangement, number of micro-batches, replicas, schedule and hosts."""
    seen: dict[object, Judged] = {}
    for one in ranked:
        c = one.candidate
        seen.setdefault((c.arrangement, c.microbatches, c.replicas, c.schedule, c.hosts), one)
    return list(seen.values())


def _uncuttable(setting: Setting) -> str:
    batch, ranks = setting.workload.batch, setting.cluster.num_ranks
    multiple = -(-batch // ranks) * ranks
    return (
        f"a batch of {batch} samples cannot be cut over {ranks} ranks by any number of stages and replicas of a model "
        f"of {len(setting.graph.backbone_layers)} trained layers; use a multiple of {ranks}, e.g. {multiple}"
    )

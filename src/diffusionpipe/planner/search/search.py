"""Searches the best plan: stages, replicas, data parallelism, micro-batches, schedule, and crossings of nodes.

    [0] copies of the model with their parameters in parts, which are quickly found: slower candidates are left sooner
    [1] every (arrangement of ranks, number of micro-batches), in the order of a lower bound of its iteration time
    [2] for each the dynamic program's partitions, with an estimate; those whose lower bound is worse than the best
        found already are never looked at, but for the most promising of each arrangement
    [3] the best ones improved: cuts moved, gradients in buckets, other schedules, unequal replicas; where devices still
        wait, several stages on each, two directions, and orders searched for these very times (`ordering`); the best of
        all with the next numbers of micro-batches
    [4] the best of these made into plans and simulated in full, with memory; the winner is the fastest that fits

Whether frozen work is filled into bubbles changes what is best, so both are judged together: in [2] and [3] by what a
good filling reaches, in [4] by the filler's own work. No step depends on chance or on the clock. An estimate without
fills is exact (`estimates`), so there [4] confirms it:

>>> from diffusionpipe.costs import AllReduce, Backbone, Cluster, Device, LayerSpec, Link, ModelGraph, ParameterSpec
>>> from diffusionpipe.costs import Profile, TensorSpec
>>> from diffusionpipe.holding import Workload
>>> from diffusionpipe.costs.profile import LayerProfile
>>> times = [1, 2, 1, 2]                        # forwards of a sample through four layers of 10^9 parameters each
>>> names = ["in", "a", "b", "c", "loss"]       # layer i reads tensor i and writes the next one
>>> graph = ModelGraph(
...     layers=tuple(
...         LayerSpec(name=f"layer{i}", component="net", reads=(names[i],), writes=(names[i + 1],),
...                   parameters=(f"w{i}",))
...         for i in range(4)
...     ),
...     tensors=tuple(TensorSpec(name=name, shape=(1,), needs_gradient=name != "in") for name in names),
...     parameters=tuple(ParameterSpec(name=f"w{i}", shape=(10**9,)) for i in range(4)),
...     inputs=("in",), backbones=(Backbone(prediction=None),),
... )
>>> layers = tuple(
...     LayerProfile(name=f"layer{i}", forward=(t,), input_grad=(t,), weight_grad=(t,), activation=(1,), workspace=(0,),
...                  kept=(0,))
...     for i, t in enumerate(times)
... )
>>> kind = dict(device="example", device_type="cpu", precision="float32", source="example")
>>> slow = AllReduce(latency=0, bandwidth=1e9)  # sums of gradients take long, so the model is cut
>>> cluster = Cluster(
...     name="two", devices=(Device(name="example", memory=10**12),) * 2, nodes=(0, 0),
...     intra=Link(), inter=Link(), intra_reduce=slow, inter_reduce=slow,
... )
>>> profile = Profile(graph=graph, batch_sizes=(1,), layers=layers, **kind)
>>> found = search(Setting(profile=profile, cluster=cluster, workload=Workload(batch=4)))
>>> candidate, proposal = found.winner
>>> candidate.schedule, candidate.microbatches, candidate.starts, proposal.iteration, 4 * 3 * sum(times) / 2
('dualpipe-v', 4, (0, 1, 2, 3), 37.0, 36.0)

The last figure is the time of two devices that never wait.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from diffusionpipe.costs.cluster import with_less_memory
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.encoders import host_sets
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.bounds import Place, is_step_possible, least_step
from diffusionpipe.planner.search.branches import add_branches
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.cascades import add_pairs, least_time, sharded_pairs
from diffusionpipe.planner.search.chains import add_chains, add_lean_chains, is_own, replicas_of
from diffusionpipe.planner.search.constants import (
    BETTER,
    ESTIMATE_TOLERANCE,
    LEAST_RAMP,
    LOW_MEMORY_SCHEDULE,
    MAX_AGAIN,
    MAX_ATTEMPTS,
    MAX_UNEQUAL_UNITS,
    NUM_FINALISTS,
    NUM_SIBLINGS,
    PROMISING,
    TABLE_CUTOFF,
)
from diffusionpipe.planner.search.improvement import add_crowded, add_cuts, add_place, add_schedules, improve
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.nearest import least_estimated_overflow
from diffusionpipe.planner.search.objectives import CriticalPath
from diffusionpipe.planner.search.placed import placed
from diffusionpipe.planner.search.places import places_of
from diffusionpipe.planner.search.pool import Judged, Pool, cut_of
from diffusionpipe.planner.search.proposal import Proposal, proposals
from diffusionpipe.planner.search.sharded import sharded_finalists, with_sharded
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.traits import holds_one, is_split
from diffusionpipe.units import Seconds

Proposed = Callable[[Candidate], Proposal]
"""A function that simulates a candidate's plan in full; see `proposals`."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The result of a search: simulated candidates, estimated ones, and the places that were looked at."""

    judge: Judge

    finalists: tuple[tuple[Candidate, Proposal], ...]
    """The candidates that were simulated in full, fastest first; those that do not fit in memory last."""
    judged: tuple[Judged, ...]
    """The other candidates that were estimated and come near, best first; each arrangement and schedule once."""
    num_estimated: int
    """The number of candidates that were estimated."""
    is_filled: bool
    """Whether frozen work runs in the bubbles."""
    is_tight: bool = False
    """Whether no pipeline fitted until candidates that need less memory were looked for."""
    places: tuple[Place, ...] = ()
    """The ways to cut the batch into pipelines and micro-batches; () with two backbones."""

    @cached_property
    def bound(self) -> Seconds:
        """A lower bound in seconds of all layouts' iterations; the bound takes a part of the search's time."""
        if not self.places:
            return least_time(self.judge)
        return least_step(self.judge, self.places, self.winner[1].step if self.winner else float("inf"))

    def may_be_beaten(self, step: Seconds) -> bool:
        """Whether a layout may take less than `step` seconds: False if `bound` excludes it. Cheaper than `bound`."""
        if not self.places:
            return self.bound < step
        return is_step_possible(self.judge, self.places, step)

    @property
    def winner(self) -> tuple[Candidate, Proposal] | None:
        """The fastest candidate that fits, with its simulation; None where nothing fits.

        `planner.choosing.best` may choose a near-tie of it.
        """
        fitting = [one for one in self.finalists if one[1].overflow <= 0]
        return fitting[0] if fitting else None


def search(
    setting: Setting,
    *,
    filler: Filler | None = None,
    num_finalists: int = NUM_FINALISTS,
    units: Collection[int] | None = None,
    limit: Seconds = float("inf"),
    judge: Judge | None = None,
    max_again: int = MAX_AGAIN,
    is_tight: bool = False,
) -> Search:
    """The result of a search for the best plans of a setting; its `winner` is None if nothing fits in memory.

    `units` are the numbers of ranks that a pipeline may have, any by default; 1 is data parallelism. With a `limit`
    only plans with a shorter step are looked for, and no plans that are made only for little memory, unless `is_tight`.
    A `judge` of the same setting holds the answers of an earlier search; one of a setting with less memory leaves room.
    After `num_finalists` full simulations only candidates are simulated that are estimated to be faster than the best.
    At most `max_again` more searches follow if the best candidates do not fit after all.

    Raises:
        ConfigError: no way of using all ranks cuts the batch at whole samples, or keeps tied layers on one rank.
    """
    pool = Pool(judge=judge or Judge(setting=setting), is_filled=filler is not None, score=limit, is_tight=is_tight)
    if len(setting.graph.backbones) > 1:
        return _search_pairs(setting, pool, filler, num_finalists, limit)
    is_limited, proposed = limit < float("inf"), proposals(setting, filler)
    places = _promising(pool, units)
    if not places:
        raise ConfigError(uncuttable(setting))
    may_shard = (units is None or 1 in units) and setting.may_shard
    sharded = sharded_finalists(setting, filler, fastest=limit) if may_shard else []  # [0]
    reached = _fastest(dict(sharded), float("inf"))
    # Candidates that are estimated up to this factor above may still win.
    pool.score = min(pool.score, ESTIMATE_TOLERANCE * reached)
    finalists, bounded = _simulated(pool, places, proposed, num_finalists, units, limit, max_again, reached=reached)
    if may_shard:
        finalists = with_sharded(setting, finalists, sharded, limit=limit)
    may_be_whole = units is None and not setting.given.is_sharded
    # Under a limit, only where a place may be fast enough and nothing is estimated to fit.
    is_open = not is_limited or (not pool.ranked() and bool(_within(pool, places)))
    if may_be_whole and is_open and all(proposal.overflow > 0 for _, proposal in finalists):
        # Estimates of memory are a little off: what misses it by least may fit.
        nearest = least_estimated_overflow(setting)
        if nearest and all(candidate != nearest.candidate for candidate, _ in finalists):
            finalists.append((nearest.candidate, proposed(nearest.candidate)))
    return _found(pool, finalists, places=bounded)


def _promising(pool: Pool, units: Collection[int] | None) -> list[Place]:
    """The places, (expected least seconds, arrangement, micro-batches), most promising first."""
    places = places_of(pool.judge, units, is_filled=pool.is_filled, ramp=LEAST_RAMP)
    return sorted(places, key=lambda place: (place[0], place[1].units, place[1].adjacent, place[2]))


def _simulated(
    pool: Pool,
    places: Sequence[Place],
    proposed: Proposed,
    num_finalists: int,
    units: Collection[int] | None,
    limit: Seconds,
    max_again: int,
    *,
    reached: Seconds = float("inf"),
) -> tuple[list[tuple[Candidate, Proposal]], list[Place]]:
    """(the best candidates of these places with their full simulations, the places with their lower bounds).

    Sharded copies are not among them. `reached`: the step of the fastest sharded copies, if any fit; infinite if not.

    Raises:
        ConfigError: as `_add_tight`.
    """
    is_limited = limit < float("inf")
    seen: set[Arrangement] = set()
    for bound, arrangement, microbatches in places:  # [1]
        # Of each arrangement one, so that it can be compared.
        if bound <= pool.score or (arrangement not in seen and not is_limited):
            known = len(pool.judged)
            add_place(pool, arrangement, microbatches)  # [2]
            # Copies of the model that do not fit at once may fit in parts.
            if arrangement.units > 1 or len(pool.judged) > known:
                seen.add(arrangement)
    bounded = _add_chains(pool, units)
    add_branches(pool, _within(pool, places))
    add_crowded(pool, _within(pool, places))
    improve(pool, _within(pool, places))  # [3]
    finalists = _finalists(pool, proposed, num_finalists, limit, reached)  # [4]
    fits_easily = any(proposal.overflow <= 0 and candidate.hosts is None for candidate, proposal in finalists)
    # Under a limit, only where the search that gave the limit looked for them too.
    pool.is_tight = not fits_easily and (pool.is_tight or not is_limited)
    if pool.is_tight:
        _add_tight(pool, [(arrangement, count) for _, arrangement, count in places])
        finalists = _finalists(pool, proposed, num_finalists, limit, reached)
    if max_again:
        finalists += _again(pool, finalists, proposed, num_finalists, units, min(limit, reached), max_again)
    return finalists, bounded


def _within(pool: Pool, places: Sequence[Place]) -> list[tuple[Arrangement, int]]:
    """The places, (arrangement, micro-batches), whose bound is below the score of the pool's best candidate."""
    return [(arrangement, count) for bound, arrangement, count in places if bound < pool.score]


def _found(
    pool: Pool, finalists: Sequence[tuple[Candidate, Proposal]], *, places: Sequence[Place] = (), num_sharded: int = 0
) -> Search:
    """The result of a search: its finalists, and the other candidates of its pool that come near.

    `num_sharded`: the number of candidates that were estimated besides.
    """
    taken = {candidate for candidate, _ in finalists}
    return Search(
        judge=pool.judge,
        # Of equally fast ones those with whole backwards come first: they are simpler.
        finalists=tuple(sorted(finalists, key=lambda pair: (pair[1].overflow > 0, pair[1].step, _splits(pair[0])))),
        judged=tuple(o for o in pool.diverse() if o.candidate not in taken and o.score <= TABLE_CUTOFF * pool.score),
        num_estimated=len(pool.judged) + num_sharded,
        is_filled=pool.is_filled,
        is_tight=pool.is_tight,
        places=tuple(places),
    )


def _splits(candidate: Candidate) -> bool:
    """Whether the candidate's published schedule splits backwards into gradients of inputs and of weights."""
    return candidate.schedule in REGISTRY and is_split(candidate.schedule)


def _search_pairs(setting: Setting, pool: Pool, filler: Filler | None, num_finalists: int, limit: Seconds) -> Search:
    """The result of a search for two backbones; the best of each kind is simulated in full, so that it can be compared.

    Raises:
        ConfigError: there are more than two, or no way of using all ranks cuts the batch at whole samples.
    """
    if len(setting.graph.backbones) > 2:
        names = ", ".join(backbone.name for backbone in setting.graph.backbones)
        raise ConfigError(f"a plan can have two backbones, not {len(setting.graph.backbones)}: {names}")
    if setting.given.sharded is not Sharded.ALL:
        add_pairs(pool)
    sharded = Pool(judge=pool.judge, is_filled=pool.is_filled, score=limit)
    for candidate in sharded_pairs(pool.judge):
        sharded.add(sharded.judged_of(candidate))
    if not pool.judged and not sharded.judged:
        raise ConfigError(uncuttable(setting))
    proposed = proposals(setting, filler)
    found = dict(_finalists(pool, proposed, num_finalists, limit))
    fastest = min((proposal.step for proposal in found.values() if proposal.overflow <= 0), default=limit)
    enough = (TABLE_CUTOFF if limit == float("inf") else 1) * fastest
    # Of each kind the best: reversed, because the last of equal names stays.
    for one in {name_of(one.candidate): one for one in reversed(pool.ranked())}.values():
        if one.candidate not in found and one.score < enough:
            found[one.candidate] = proposed(one.candidate)
    found |= _in_parts([one for one in sharded.judged.values() if one.score < enough], proposed)
    return _found(pool, list(found.items()), num_sharded=len(sharded.judged))


def _in_parts(judged: Sequence[Judged], proposed: Proposed) -> dict[Candidate, Proposal]:
    """Candidate -> its full simulation, for sharded copies of two backbones, up to the first that fits in memory.

    The best estimate is simulated first.
    """
    found: dict[Candidate, Proposal] = {}
    left = [one.candidate for one in sorted(judged, key=lambda one: one.score)]
    while left and len(found) < MAX_ATTEMPTS:
        one = left[0]
        found[one] = proposed(one)
        if found[one].overflow <= 0:
            break
        # With the same micro-batches, blocks as large as these or larger do not fit either.
        left = [other for other in left if other.orders != one.orders or other.buckets > one.buckets]
    return found


def _finalists(
    pool: Pool, proposed: Proposed, num_finalists: int, limit: Seconds, reached: Seconds = float("inf")
) -> list[tuple[Candidate, Proposal]]:
    """The best candidates of the pool with their full simulations, in the order of their estimates.

    As soon as one of them fits, only candidates are tried that may be faster than it and than `reached`, the step of
    the fastest sharded copies.
    """
    ranked = pool.diverse()
    finalists: list[tuple[Candidate, Proposal]] = []
    fastest = limit
    for one in ranked:
        # What is estimated to be faster is tried until none is left; then a few that are estimated to be near.
        if one.score >= (ESTIMATE_TOLERANCE if len(finalists) < num_finalists else BETTER) * fastest:
            break
        proposal = proposed(one.candidate)
        finalists.append((one.candidate, proposal))
        if proposal.overflow <= 0:
            fastest = min(fastest, proposal.step, reached)
    best = min((pair for pair in finalists if pair[1].overflow <= 0), key=lambda pair: pair[1].step, default=None)
    if best and pool.is_filled:
        # The best one's twin, and those of others that would be better if they were as fast as estimated.
        hopeful = [one for one, _ in finalists if one == best[0] or pool.judged[one].score < fastest]
        known = {candidate for candidate, _ in finalists}
        twins = dict.fromkeys(pool.twin(one).candidate for one in hopeful)
        finalists += [(twin, proposed(twin)) for twin in twins if twin not in known]
        finalists += _siblings(pool, hopeful, finalists, proposed, fastest)
    # Filling never does quite as well as estimated, but for copies of the model: they may win although they rank lower.
    copies = next((j for j in ranked if j.candidate.is_copy and j.score < ESTIMATE_TOLERANCE * fastest), None)
    if copies and all(candidate != copies.candidate for candidate, _ in finalists):
        finalists.append((copies.candidate, proposed(copies.candidate)))
    return finalists


def _siblings(
    pool: Pool,
    hopeful: Sequence[Candidate],
    finalists: Sequence[tuple[Candidate, Proposal]],
    proposed: Proposed,
    fastest: Seconds,
) -> list[tuple[Candidate, Proposal]]:
    """Other cuts of the `hopeful` candidates with their full simulations, if they are estimated to beat `fastest`.

    Filling does better or worse by some percent for cuts that differ by a layer, which no estimate shows.
    """
    known, found = {candidate for candidate, _ in finalists}, list[tuple[Candidate, Proposal]]()
    for candidate in hopeful:
        others = [one for one in pool.siblings(candidate) if one.candidate not in known and one.score < fastest]
        for one in others[:NUM_SIBLINGS]:
            found.append((one.candidate, proposed(one.candidate)))
            known.add(one.candidate)
    return found


def _again(
    pool: Pool,
    finalists: Sequence[tuple[Candidate, Proposal]],
    proposed: Proposed,
    num_finalists: int,
    units: Collection[int] | None,
    limit: Seconds,
    max_again: int,
) -> list[tuple[Candidate, Proposal]]:
    """Further candidates with their full simulations, if some finalists do not fit or are much slower than estimated.

    While these were thought to fit and to be fast, they kept slower candidates out of the pool. [] if the estimates of
    the finalists were good.
    """
    found, known = dict(finalists), {candidate for candidate, _ in finalists}
    others = _corrected(pool, found, limit)
    if others is None:
        return []
    spare = max(others.less.values(), default=0)

    def simulate(other: Pool, again: int) -> None:
        other.score = _fastest(found, limit)
        # With less memory all that is left may put layers with a parameter in common on several ranks.
        with suppress(ConfigError):
            found.update(
                _simulated(other, _promising(other, units), proposed, num_finalists, units, other.score, again)[0]
            )

    for _ in range(max_again):
        simulate(others, 0)
        if (others := _corrected(others, found, limit)) is None:
            break
    if spare:
        # With less memory for all, other cuts are found, but none with less room than these.
        own = pool.judge.setting
        fewer = Judge(setting=replace(own, cluster=with_less_memory(own.cluster, spare)))
        simulate(Pool(judge=fewer, is_filled=pool.is_filled, is_tight=pool.is_tight), max_again - 1)
    return [pair for pair in found.items() if pair[0] not in known]


def _fastest(found: Mapping[Candidate, Proposal], limit: Seconds) -> Seconds:
    """The shortest step of the simulated candidates that fit, in seconds; `limit` at most."""
    return min([limit, *(proposal.step for proposal in found.values() if proposal.overflow <= 0)])


def _corrected(pool: Pool, found: Mapping[Candidate, Proposal], limit: Seconds) -> Pool | None:
    """An empty pool that corrects the estimates of cuts that held more, or took longer, than this pool estimated.

    None if there are no such cuts. Only cuts count that were estimated to have the shortest step.
    """
    less, slower, fastest = dict(pool.less), dict(pool.slower), _fastest(found, limit)
    for one in (pool.judged[candidate] for candidate in found if candidate in pool.judged):
        if not one.fits or one.score * ESTIMATE_TOLERANCE >= fastest:
            continue
        cut, proposal = cut_of(one.candidate), found[one.candidate]
        if proposal.overflow > 0:
            # With one byte less than the room that it seemed to have it does not fit.
            less[cut] = max(less.get(cut, 0), pool.less.get(cut, 0) + 1 - one.estimate.overflow)
        elif proposal.iteration > PROMISING * one.score:
            slower[cut] = max(slower.get(cut, 1.0), pool.slower.get(cut, 1.0) * proposal.iteration / one.score)
    if (less, slower) == (pool.less, pool.slower):
        return None
    return Pool(judge=pool.judge, is_filled=pool.is_filled, is_tight=pool.is_tight, less=less, slower=slower)


def _add_chains(pool: Pool, units: Collection[int] | None) -> list[tuple[Seconds, Arrangement, int]]:
    """Add the best chains of each place to the pool, also with less memory and with other schedules.

    Returns the places, (lower bound in seconds, arrangement, micro-batches), smallest bound first.
    """
    places = sorted(places_of(pool.judge, units), key=lambda place: place[0])
    for bound, arrangement, microbatches in places if pool.judge.setting.given.allows_chains else ():
        if bound < pool.score and arrangement.units > 1:
            # All units as replicas of one stage share the frozen work as they have time, which copies do not.
            copies = (arrangement.units,)
            if is_own(pool, arrangement, copies) and copies[0] in replicas_of(pool.judge, arrangement, microbatches):
                add_cuts(pool, arrangement, microbatches, [((0,), copies)])
            best = add_chains(pool, arrangement, microbatches)
            best = add_lean_chains(pool, arrangement, microbatches) or best
            if best:
                add_schedules(pool, best)
    return places


def _add_tight(pool: Pool, places: Sequence[tuple[Arrangement, int]]) -> None:
    """Add candidates to the pool that need less memory.

    They have encoders on some ranks alone, several stages on a worker, or one micro-batch under way at a time.

    Raises:
        ConfigError: all candidates so far, these too, put layers with a common parameter on several ranks.
    """
    judge, given = pool.judge, pool.judge.setting.given
    for arrangement, microbatches in places:
        if not 1 < arrangement.units <= MAX_UNEQUAL_UNITS:
            continue
        for candidate in placed(judge, arrangement, microbatches):
            one = pool.with_hosts(candidate)
            if judge.footprint.fits(one):
                pool.add(pool.judged_of(one))
        if not given.allows_chains:
            continue
        may_choose = pool.is_filled and judge.footprint.frozen_bytes > 0
        sets = host_sets(judge.tables.ground(arrangement).memories) if may_choose else ()
        for hosts in sets:
            partitions = judge.questions.partitions(arrangement, microbatches, CriticalPath(microbatches), hosts=hosts)
            cuts = [(partition.starts, partition.replicas) for partition in partitions]
            add_cuts(pool, arrangement, microbatches, cuts, hosts=hosts)
        anywhere: tuple[tuple[int, ...] | None, ...] = (None, *sets)
        for some in anywhere if given.schedule is None or holds_one(given.schedule) else ():
            # Micro-batches pass one after the other, so what counts is the way of one of them.
            partitions = judge.questions.partitions(arrangement, microbatches, CriticalPath(1), in_flight=1, hosts=some)
            for partition in partitions:
                candidate = Candidate(
                    arrangement=arrangement,
                    schedule=given.schedule or LOW_MEMORY_SCHEDULE,
                    microbatches=microbatches,
                    starts=partition.starts,
                    replicas=partition.replicas,
                    hosts=some,
                    sharded=judge.setting.sharded,
                )
                if candidate.divides(judge.setting.workload.batch):
                    pool.add(pool.judged_of(candidate))
    if pool.refused and not pool.judged and not given.is_sharded:
        raise ConfigError(pool.refused)


def uncuttable(setting: Setting) -> str:
    """A sentence that no arrangement of all ranks cuts the setting's batch, with a batch that can be cut."""
    return uncuttable_batch(setting.workload.batch, setting.cluster.num_ranks, len(setting.graph.backbone_layers))


def uncuttable_batch(batch: int, num_ranks: int, num_layers: int) -> str:
    """A sentence that no arrangement of `num_ranks` ranks cuts the batch, with a batch that can be cut.

    For a model without trained layers it says that there is nothing to cut.
    """
    if not num_layers:
        return "the model has no trained layers, so there is nothing to cut into stages; profile one that trains some"
    multiple = -(-batch // num_ranks) * num_ranks
    return (
        f"a batch of {batch} samples cannot be cut over {num_ranks} ranks by any number of stages and replicas of a "
        f"model of {num_layers} trained layers; use a multiple of {num_ranks}, e.g. {multiple}"
    )

"""Chooses the best plan of a setting among the fastest that the searches find and its near-ties."""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.explain import TriedCounts
from diffusionpipe.planner.choosing.near_ties import Merits, hopeful, merits_of, rank
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import check_given
from diffusionpipe.planner.pricing.owning import settings_with_owners
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import check_storage, settings_in_storages
from diffusionpipe.planner.search.bounds import may_fit
from diffusionpipe.planner.search.branch_order import in_branch_order
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.places import places_of
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.timing.legal import check
from diffusionpipe.units import Seconds

GAIN = 1e-3
"""The part of a step that filling, or encoders in host memory, must save to be chosen if either way is allowed."""
ROOM = 1.002
"""An iteration of at most this multiple of its lower bound is not worth a search with more memory."""
PASSES = 0.05
"""On one device a plan with fewer micro-batches is chosen if its step is longer than the fastest by at most this part.
"""
ROUNDING = 1e-9
"""Steps that differ by less than this part are equal."""
MOST_TRIED = 4
"""The most estimated layouts that are simulated because they may be the better near-ties: each takes a plan's time."""


def best_choice(
    setting: Setting, *, fill: bool | None = None, limit: Seconds = float("inf"), is_tight: bool = False
) -> Choice | None:
    """The fastest plan that fits in memory with a step below `limit`, or a near-tie of it; None where there is none.

    It is the plan that `choose` gives, without the time that its advice takes if nothing fits. `fill`: whether encoders
    run in the bubbles; None tries both. `is_tight`: plans that are made only for little memory are looked for under a
    limit too.

    Raises:
        ConfigError: the sizes do not fit each other.
    """
    check_given(
        setting.given,
        batch=setting.workload.batch,
        num_ranks=setting.cluster.num_ranks,
        num_backbones=len(setting.graph.backbones),
    )
    check_storage(setting)
    setting = in_branch_order(setting)
    if len(setting.graph.backbones) <= 2 and not may_fit(setting):  # of more the search says that it has no plan
        return None
    is_whole = setting.given.sharded is not Sharded.OPTIMIZER
    settings = [setting] if setting.given.encoders in (None, setting.workload.encoders.name) else []
    ways = _ways(setting, fill, limit, is_tight=is_tight) if settings and is_whole else []
    for moved in settings_in_storages(setting):
        settings.append(moved)
        # Layouts in other storages leave more memory, so they are looked at only where more memory could help.
        if is_whole and _leaves_time(ways):
            ways += _ways(moved, fill, limit, ways, is_tight=is_tight)
    for divided in (one for own in settings for one in settings_with_owners(own)):
        if _leaves_time(ways) and (not is_whole or _cuts_the_batch(divided)):
            ways += _ways(divided, fill, limit, ways, is_tight=is_tight)
    return _of_near_ties(ways, fill) if ways else None


def _cuts_the_batch(setting: Setting) -> bool:
    """Whether some layout of the setting divides the batch; True for several backbones, where a search has to tell."""
    if len(setting.graph.backbones) > 1:
        return True
    return any(True for _ in places_of(Judge(setting=setting), is_filled=True, ramp=0.0))


def _ways(
    setting: Setting, fill: bool | None, limit: Seconds, before: Sequence[Choice] = (), *, is_tight: bool = False
) -> list[Choice]:
    """The fastest plans that fit below the limit, one with fills and one without; each is faster than the one before.

    A way without such a plan is left out. The way with fills comes first, because it leaves few layouts to search
    without.

    Args:
        setting: the setting.
        fill: the only way to look at; None for both.
        limit: the seconds below which a step must be, if `before` is empty.
        before: choices of other settings; each new one must be faster than the last of them. If that is a pipeline for
            little memory, its step does not limit the search: others of its kind may be much faster here.
        is_tight: see `best_choice`.
    """
    ways = (fill,) if fill is not None else (True, False)
    judge, found, last = Judge(setting=setting), list[Choice](), before[-1] if before else None
    for is_filled in ways if setting.graph.frozen_layers else (False,):
        filler = filler_of(setting) if is_filled else None
        # Each way must beat the one before by more than rounding and simplicity are worth.
        limit = last.step * (1 - GAIN) if last else limit
        may_gain_much = last is not None and last.search.is_tight and not last.candidate.is_copy
        most = float("inf") if may_gain_much else limit
        result = search(setting, filler=filler, limit=most, judge=judge, is_tight=is_tight)
        if result.winner is not None and result.winner[1].step < limit:
            candidate, proposal = result.winner
            last = Choice(setting=setting, candidate=candidate, proposal=proposal, search=result, filler=filler)
            found.append(last)
    return found


def _of_near_ties(ways: Sequence[Choice], fill: bool | None) -> Choice:
    """The plan that is chosen among the fastest and its near-ties, from all layouts that the searches looked at.

    The most hopeful of the layouts that were only estimated are simulated first.
    """
    # Simulating the most hopeful estimates may give another fastest plan, so all are ranked again.
    fastest, chosen = _ranked(ways)
    ways = [_with_hopeful(way, fastest=fastest.merits, than=chosen.merits) for way in ways]
    fastest, chosen = _ranked(ways)
    if chosen.filler and fill is None:
        chosen = _simpler(chosen, fastest)
    if chosen.setting.cluster.num_ranks == 1:
        chosen = _in_fewest_passes(chosen, fastest)
    chosen = replace(chosen, tried=_tried(ways))
    is_other = (chosen.setting, chosen.candidate) != (fastest.setting, fastest.candidate)
    check(chosen.proposal.train)
    gives_up = chosen.step > fastest.step * (1 + (ROUNDING if is_other else GAIN))
    return replace(chosen, faster=fastest) if gives_up else chosen


def _in_fewest_passes(choice: Choice, fastest: Choice) -> Choice:
    """The choice with the fewest micro-batches on one device whose step is at most 5 % longer than the fastest.

    It is `choice` itself if no smaller number fits, or if the number is given.
    """
    setting, own = choice.setting, choice.candidate
    if setting.given.microbatches is not None or own.orders is not None:
        return choice
    # Fewest first, so the first that fits is taken.
    for count in (count for count in range(1, own.microbatches) if setting.workload.batch % count == 0):
        candidate = replace(own, microbatches=count)
        proposal = propose(setting, candidate.layout(setting), choice.filler)
        if proposal.overflow <= 0 and proposal.step <= fastest.step * (1 + PASSES):
            finalists = ((candidate, proposal), *choice.search.finalists)
            kept = replace(choice.search, finalists=finalists)
            return replace(choice, candidate=candidate, proposal=proposal, search=kept)
    return choice


def _tried(ways: Sequence[Choice]) -> TriedCounts:
    """The numbers of layouts that the searches estimated and simulated, and of those that fit."""
    finalists = [proposal for way in ways for _, proposal in way.search.finalists]
    return TriedCounts(
        estimated=sum(way.search.num_estimated for way in ways),
        simulated=len(finalists),
        fitting=sum(proposal.overflow <= 0 for proposal in finalists),
    )


def _ranked(ways: Sequence[Choice]) -> tuple[Choice, Choice]:
    """(the fastest plan that fits of all that the searches simulated, the near-tie of it that is chosen)."""
    fitting = [
        replace(way, candidate=candidate, proposal=proposal)
        for way in ways
        for candidate, proposal in way.search.finalists
        if proposal.overflow <= 0
    ]
    fastest = min(fitting, key=lambda way: way.step)
    near = [way for way in fitting if way.merits.is_near(fastest.merits)]
    return fastest, min(near, key=lambda way: rank(way.merits, fastest.merits))


def _with_hopeful(way: Choice, *, fastest: Merits, than: Merits) -> Choice:
    """The choice after some of its search's estimated layouts were simulated and moved to the simulated ones.

    These may be better choices than `than`, the most hopeful first, up to the first that is better indeed.
    """
    found = dict(way.search.finalists)
    known = {candidate.layout(way.setting): proposal for candidate, proposal in found.items()}
    for one in hopeful(way.search.judged, Judge(setting=way.setting), than=than, fastest=fastest)[:MOST_TRIED]:
        layout = one.candidate.layout(way.setting)
        if layout not in known:  # candidates that differ in their hosts alone share a plan
            known[layout] = propose(way.setting, layout, way.filler)
        found[one.candidate] = proposal = known[layout]
        merits = merits_of(way.setting, one.candidate, proposal)
        if proposal.overflow <= 0 and merits.is_near(fastest) and rank(merits, fastest) < rank(than, fastest):
            break
    finalists = sorted(found.items(), key=lambda pair: (pair[1].overflow > 0, pair[1].step))
    judged = tuple(one for one in way.search.judged if one.candidate not in found)
    return replace(way, search=replace(way.search, finalists=tuple(finalists), judged=judged))


def _simpler(choice: Choice, fastest: Choice) -> Choice:
    """The same choice without filling, if that is a near-tie that fits and saves memory or is hardly slower.

    Else it is `choice` as it is.
    """
    proposal = propose(choice.setting, choice.candidate.layout(choice.setting))
    unfilled = replace(choice, proposal=proposal, filler=None)
    own, merits = choice.merits, unfilled.merits
    is_hardly_slower = proposal.step <= choice.step * (1 + GAIN) and not own.saves(merits)
    if proposal.overflow > 0 or not merits.is_near(fastest.merits) or not (is_hardly_slower or merits.saves(own)):
        return choice
    finalists = ((choice.candidate, proposal), *choice.search.finalists)
    return replace(unfilled, search=replace(choice.search, finalists=finalists))


def _leaves_time(ways: Sequence[Choice]) -> bool:
    """Whether a search with more memory could find a faster plan than the last one; True if there is none yet."""
    # Near the bound no layout can be clearly faster, with more memory or less.
    return not ways or ways[-1].search.may_be_beaten(ways[-1].proposal.iteration / ROOM)

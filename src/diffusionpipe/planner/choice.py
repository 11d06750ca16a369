"""The plan that is chosen of the fastest that a search finds and its near-ties, with the figures that speak for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Plan
from diffusionpipe.planner.advice import nothing_fits
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.explain import Comparison, compare
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.near_ties import Merits, hopeful, merits_of, rank, reason_of
from diffusionpipe.planner.pricing.given import check_given
from diffusionpipe.planner.pricing.offload import check_offload, is_heavy, offloaded
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rows import row_of, sizes_in
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.proposal import Proposal, pricing_of, propose
from diffusionpipe.planner.search.search import Search, search
from diffusionpipe.planner.unflushed import unflushed
from diffusionpipe.units import Seconds

GAIN = 1e-3
"""Filling, and encoders in host memory, must save this part of the iteration where either way is allowed."""
ROOM = 1.002
"""A plan this near its lower bound is not worth a search with more memory."""
ROUNDING = 1e-9
"""Steps that differ by less are equal."""
MOST_TRIED = 4
"""Estimated layouts that are simulated because they may be a near-tie's better choice: each costs a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best way found."""

    setting: Setting
    candidate: Candidate
    proposal: Proposal
    search: Search
    filler: Filler | None
    """None: every batch is encoded before its first forward."""
    faster: "Choice | None" = None
    """The fastest way, where another is about as fast and is chosen for its memory or its simplicity; see
    `near_ties`."""

    @property
    def sizes(self) -> str:
        """Schedule and sizes in words, e.g. "1f1b, 2 stages, 4 micro-batches, filled"."""
        sizes = sizes_in(self.setting, self.candidate)
        return f"{name_of(self.candidate)}, {sizes}{', filled' if self.filler else ''}"

    @property
    def step(self) -> Seconds:
        """Predicted time of one iteration and the update after it."""
        return self.proposal.step

    @property
    def merits(self) -> Merits:
        """What it is compared by with near-ties."""
        return merits_of(self.setting, self.candidate, self.proposal)

    @property
    def fastest(self) -> "Choice":
        """The fastest way that was found; this one, unless it gives something up."""
        return self.faster or self

    def comparison(self) -> Comparison:
        """It beside all others, and why it is the best."""
        own, faster = (self.candidate, self.proposal), self.faster
        # The fastest may be of another search, in which frozen work is encoded or kept elsewhere.
        beside = [row_of(faster.setting, faster.candidate, faster.proposal)] if faster else []
        remarks = [self._given_up(faster)] if faster else []
        return compare(self.setting, self.search, chosen=own, beside=beside, remarks=remarks)

    def _given_up(self, faster: "Choice") -> str:
        """What a near-tie costs, and why it is taken."""
        reason = reason_of(self.merits, faster.merits) or "filling bubbles gains too little"
        return (
            f"A near-tie: {faster.sizes} would take {1 - faster.step / self.step:.2%} less time "
            f"({faster.step * 1e3:.1f} ms a step), and predictions are not that sure. The plan is chosen because "
            f"{reason}."
        )

    def with_unflushed(self) -> Comparison:
        """The same with rows of training without a flush, which the planner never chooses by itself."""
        return replace(self.comparison(), unflushed=unflushed(self.setting, self.filler))

    def plan(self, *, sample_batch: int = 0) -> Plan:
        """The plan; `sample_batch` as in `Layout`."""
        layout = replace(self.candidate.layout(self.setting), sample_batch=sample_batch)
        return build_plan(self.setting.graph, layout, pricing=pricing_of(self.setting), filler=self.filler)


def choose(setting: Setting, *, fill: bool | None = None) -> Choice:
    """The fastest plan that fits in memory and keeps to `setting.given`, or a near-tie of it (see `near_ties`).

    `fill` says whether frozen work of the next batch runs in the bubbles of this one; None tries both. A model without
    frozen layers has nothing to fill with. Whether the frozen part rests in host memory is the planner's choice too,
    where nothing else is given.

    Raises:
        ConfigError: the sizes do not fit each other, or nothing fits in memory; says by how much, and what would.
    """
    best = best_choice(setting, fill=fill)
    if best is None:
        raise ConfigError(nothing_fits(setting))
    return best


def best_choice(setting: Setting, *, fill: bool | None = None) -> Choice | None:
    """As `choose`; None where nothing fits, without the time that the advice takes.

    Raises:
        ConfigError: the sizes do not fit each other.
    """
    check_given(
        setting.given,
        batch=setting.workload.batch,
        num_ranks=setting.cluster.num_ranks,
        num_backbones=len(setting.graph.backbones),
    )
    place = setting.given.offload_frozen
    if place:
        check_offload(setting)
    ways = _ways(setting, fill, None) if not place else []
    if place or (place is None and is_heavy(setting) and _leaves_time(ways)):
        ways += _ways(offloaded(setting), fill, ways[-1] if ways else None)
    return _of_near_ties(ways, fill) if ways else None


def _ways(setting: Setting, fill: bool | None, best: Choice | None) -> list[Choice]:
    """The fastest that fits, filled or not, where it beats what is known; each beats the one before.

    Filled is looked for first, because that leaves little to look at of the other way.
    """
    ways = (fill,) if fill is not None else (True, False)
    judge, found = Judge(setting=setting), list[Choice]()
    for is_filled in ways if setting.graph.frozen_layers else (False,):
        filler = filler_of(setting) if is_filled else None
        limit = best.step * (1 - GAIN) if best else float("inf")
        result = search(setting, filler=filler, limit=limit, judge=judge)
        if result.winner is not None and result.winner[1].step < limit:
            candidate, proposal = result.winner
            best = Choice(setting=setting, candidate=candidate, proposal=proposal, search=result, filler=filler)
            found.append(best)
    return found


def _of_near_ties(ways: Sequence[Choice], fill: bool | None) -> Choice:
    """The choice among what the searches simulated, and what they estimated to be a near-tie's better choice."""
    fastest, chosen = _ranked(ways)
    ways = [_with_hopeful(way, fastest=fastest.merits, than=chosen.merits) for way in ways]
    fastest, chosen = _ranked(ways)
    if chosen.filler and fill is None:
        chosen = _simpler(chosen, fastest)
    is_other = (chosen.setting, chosen.candidate) != (fastest.setting, fastest.candidate)
    gives_up = chosen.step > fastest.step * (1 + (ROUNDING if is_other else GAIN))
    return replace(chosen, faster=fastest) if gives_up else chosen


def _ranked(ways: Sequence[Choice]) -> tuple[Choice, Choice]:
    """Of all that the searches simulated the fastest that fits, and the one that is chosen."""
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
    """The way with its search's most hopeful estimates simulated, up to the first that is as good as estimated."""
    found = dict(way.search.finalists)
    for one in hopeful(way.search.judged, Judge(setting=way.setting), than=than, fastest=fastest)[:MOST_TRIED]:
        proposal = propose(way.setting, one.candidate.layout(way.setting), way.filler)
        found[one.candidate] = proposal
        merits = merits_of(way.setting, one.candidate, proposal)
        if proposal.overflow <= 0 and merits.is_near(fastest) and rank(merits, fastest) < rank(than, fastest):
            break
    finalists = sorted(found.items(), key=lambda pair: (pair[1].overflow > 0, pair[1].step))
    judged = tuple(one for one in way.search.judged if one.candidate not in found)
    return replace(way, search=replace(way.search, finalists=tuple(finalists), judged=judged))


def _simpler(choice: Choice, fastest: Choice) -> Choice:
    """The same without filling, if that is hardly slower, or saves memory, and fits."""
    proposal = propose(choice.setting, choice.candidate.layout(choice.setting))
    unfilled = replace(choice, proposal=proposal, filler=None)
    own, merits = choice.merits, unfilled.merits
    is_hardly_slower = proposal.step <= choice.step * (1 + GAIN) and not own.saves(merits)
    if proposal.overflow > 0 or not merits.is_near(fastest.merits) or not (is_hardly_slower or merits.saves(own)):
        return choice
    finalists = ((choice.candidate, proposal), *choice.search.finalists)
    return replace(unfilled, search=replace(choice.search, finalists=finalists))


def _leaves_time(ways: Sequence[Choice]) -> bool:
    """Whether more memory could make it faster."""
    return not ways or ways[-1].proposal.iteration > ROOM * ways[-1].search.bound

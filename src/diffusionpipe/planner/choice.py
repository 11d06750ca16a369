"""The plan that the search chooses, with the figures that speak for it."""

from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Plan
from diffusionpipe.planner.advice import nothing_fits
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.explain import Comparison, compare, sizes_in
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import check_given
from diffusionpipe.planner.pricing.offload import check_offload, is_heavy, offloaded
from diffusionpipe.planner.pricing.setting import Setting
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest way found."""

    setting: Setting
    candidate: Candidate
    proposal: Proposal
    search: Search
    filler: Filler | None
    """None: every batch is encoded before its first forward."""

    @property
    def sizes(self) -> str:
        """Schedule and sizes in words, e.g. "1f1b, 2 stages, 4 micro-batches, filled"."""
        sizes = sizes_in(self.setting, self.candidate)
        return f"{name_of(self.candidate)}, {sizes}{', filled' if self.filler else ''}"

    @property
    def step(self) -> Seconds:
        """Predicted time of one iteration and the update after it."""
        return self.proposal.step

    def comparison(self) -> Comparison:
        """It beside all others, and why it is the best."""
        return compare(self.setting, self.search)

    def with_unflushed(self) -> Comparison:
        """The same with rows of training without a flush, which the planner never chooses by itself."""
        return replace(self.comparison(), unflushed=unflushed(self.setting, self.filler))

    def plan(self, *, sample_batch: int = 0) -> Plan:
        """The plan; `sample_batch` as in `Layout`."""
        layout = replace(self.candidate.layout(self.setting), sample_batch=sample_batch)
        return build_plan(self.setting.graph, layout, pricing=pricing_of(self.setting), filler=self.filler)


def choose(setting: Setting, *, fill: bool | None = None) -> Choice:
    """The fastest plan that fits in memory and keeps to `setting.given`.

    `fill` says whether frozen work of the next batch runs in the bubbles of this one; None tries both. A model without
    frozen layers has nothing to fill with. Whether the frozen part rests in host memory is the planner's choice too,
    where nothing else is given.

    Raises:
        ConfigError: the sizes do not fit each other, or nothing fits in memory; says by how much, and what would.
    """
    best = fastest(setting, fill=fill)
    if best is None:
        raise ConfigError(nothing_fits(setting))
    return best


def fastest(setting: Setting, *, fill: bool | None = None) -> Choice | None:
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
    best = _faster(setting, fill, None) if not place else None
    if place or (place is None and is_heavy(setting) and _leaves_time(best)):
        best = _faster(offloaded(setting), fill, best)
    return best


def _faster(setting: Setting, fill: bool | None, best: Choice | None) -> Choice | None:
    """The fastest that fits, filled or not, if it beats what is known; else that.

    Filled is looked for first, because that leaves little to look at of the other way.
    """
    ways = (fill,) if fill is not None else (True, False)
    judge = Judge(setting=setting)
    for is_filled in ways if setting.graph.frozen_layers else (False,):
        filler = filler_of(setting) if is_filled else None
        limit = best.step * (1 - GAIN) if best else float("inf")
        found = search(setting, filler=filler, limit=limit, judge=judge)
        if found.winner is not None and found.winner[1].step < limit:
            candidate, proposal = found.winner
            best = Choice(setting=setting, candidate=candidate, proposal=proposal, search=found, filler=filler)
    return _simpler(best) if best and best.filler and fill is None else best


def _simpler(choice: Choice) -> Choice:
    """The same without filling, if that is hardly slower and fits."""
    proposal = propose(choice.setting, choice.candidate.layout(choice.setting))
    if proposal.overflow > 0 or proposal.step > choice.step * (1 + GAIN):
        return choice
    finalists = ((choice.candidate, proposal), *choice.search.finalists)
    return replace(choice, proposal=proposal, search=replace(choice.search, finalists=finalists), filler=None)


def _leaves_time(choice: Choice | None) -> bool:
    """Whether more memory could make it faster."""
    return choice is None or choice.proposal.iteration > ROOM * choice.search.bound

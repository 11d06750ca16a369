"""The plan that the search chooses, with the figures that speak for it."""

from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Plan
from diffusionpipe.planner.build import Filler, build_plan
from diffusionpipe.planner.candidates import Candidate
from diffusionpipe.planner.explain import Comparison, compare, name_of, sizes_of
from diffusionpipe.planner.filling import filler_of
from diffusionpipe.planner.given import check_given
from diffusionpipe.planner.proposal import Proposal, pricing_of
from diffusionpipe.planner.search import Search, search
from diffusionpipe.planner.stage_costs import Setting
from diffusionpipe.units import Seconds

GAIN = 1e-3
"""Filling must save this part of the iteration where either way is allowed; else the batch is encoded first."""


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
        return f"{name_of(self.candidate)}, {sizes_of(self.candidate)}{', filled' if self.filler else ''}"

    @property
    def step(self) -> Seconds:
        """Predicted time of one iteration and the update after it."""
        return self.proposal.step

    def comparison(self) -> Comparison:
        """It beside all others, and why it is the best."""
        return compare(self.setting, self.search)

    def plan(self, *, sample_batch: int = 0) -> Plan:
        """The plan; `sample_batch` as in `Layout`."""
        layout = replace(self.candidate.layout(self.setting), sample_batch=sample_batch)
        return build_plan(self.setting.graph, layout, pricing=pricing_of(self.setting), filler=self.filler)


def choose(setting: Setting, *, fill: bool | None = None) -> Choice:
    """The fastest plan that fits in memory and keeps to `setting.given`.

    `fill` says whether frozen work of the next batch runs in the bubbles of this one; None tries both. A model without
    frozen layers has nothing to fill with.

    Raises:
        ConfigError: the sizes do not fit each other, or nothing fits in memory; says by how much, and what would.
    """
    check_given(setting.given, batch=setting.workload.batch, num_ranks=setting.cluster.num_ranks)
    ways = (fill,) if fill is not None else (False, True)
    fillers = [filler_of(setting) for is_filled in ways if is_filled and setting.graph.frozen_layers]
    searches: list[tuple[Search, Filler | None]] = [(search(setting, filler=filler), filler) for filler in fillers]
    if False in ways or not searches:
        searches.insert(0, (search(setting), None))
    best: Choice | None = None
    for found, filler in searches:
        if found.winner is None:
            continue
        candidate, proposal = found.winner
        if best is None or proposal.step < best.step * (1 - GAIN):
            best = Choice(setting=setting, candidate=candidate, proposal=proposal, search=found, filler=filler)
    if best is None:
        raise ConfigError(compare(setting, searches[0][0]).verdict)
    return best

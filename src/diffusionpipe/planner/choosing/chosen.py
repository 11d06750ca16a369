"""A plan that was chosen, with its simulation and its comparison with other candidates."""

from dataclasses import dataclass, replace

from diffusionpipe.ir import Plan
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.choosing.explain import Comparison, Remark, TriedCounts, compare
from diffusionpipe.planner.choosing.near_ties import Merits, merits_of, reason_of
from diffusionpipe.planner.choosing.rows import Row, row_of, sizes_in
from diffusionpipe.planner.choosing.unflushed import unflushed
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.branch_order import unbranched
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.proposal import Proposal, pricing_of
from diffusionpipe.planner.search.search import Search
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan that was chosen, with its candidate, its simulation and the search that found it."""

    setting: Setting
    candidate: Candidate
    proposal: Proposal
    search: Search
    filler: Filler | None
    """The function that fills bubbles with frozen work; None: every batch is encoded before its first forward."""
    faster: "Choice | None" = None
    """The fastest choice, if this one is about as fast and was chosen for its memory or its simplicity (`near_ties`);
    else None."""
    tried: TriedCounts | None = None
    """The number of layouts that all searches together looked at, of which this is the best; None: not counted."""

    @property
    def sizes(self) -> str:
        """Schedule and sizes in words, e.g. "1f1b, 2 stages, 4 micro-batches, filled"."""
        sizes = sizes_in(self.setting, self.candidate)
        return f"{name_of(self.candidate)}, {sizes}{', filled' if self.filler else ''}"

    @property
    def step(self) -> Seconds:
        """The predicted seconds of one iteration and the update after it."""
        return self.proposal.step

    @property
    def merits(self) -> Merits:
        """The step, the memory and the complexity by which the plan is compared with near-ties."""
        return merits_of(self.setting, self.candidate, self.proposal)

    @property
    def fastest(self) -> "Choice":
        """The fastest choice that was found: `faster`, or this one."""
        return self.faster or self

    @property
    def row(self) -> Row:
        """The plan's row of figures in a table of candidates."""
        return row_of(self.setting, self.candidate, self.proposal)

    def comparison(self) -> Comparison:
        """The table of the plan, all other candidates and other systems, with the reason why the plan is the best."""
        own, faster = (self.candidate, self.proposal), self.faster
        # The fastest may be of another search, in which frozen work is encoded or kept elsewhere.
        beside = [faster.row] if faster else []
        remarks = [self._given_up(faster)] if faster else []
        if self.candidate.workers > 1 and (why := unbranched(self.setting)):
            remarks.append(Remark(text=why))
        return replace(compare(self.setting, self.search, chosen=own, beside=beside, remarks=remarks), tried=self.tried)

    def _given_up(self, faster: "Choice") -> Remark:
        """A remark that says how much faster `faster` is and why this near-tie was chosen in its place."""
        reason = reason_of(self.merits, faster.merits) or "filling bubbles gains too little"
        text = (
            f"A near-tie: {faster.sizes} would take {1 - faster.step / self.step:.2%} less time "
            f"({faster.step * 1e3:.1f} ms a step), and predictions are not that sure. The plan is chosen because "
            f"{reason}."
        )
        return Remark(text=text)

    def with_unflushed(self) -> Comparison:
        """The comparison with further rows for training without a flush, which the planner never chooses by itself."""
        return replace(self.comparison(), unflushed=unflushed(self.setting, self.filler))

    def plan(self, *, sample_batch: int = 0) -> Plan:
        """The complete plan; `sample_batch`: the samples drawn at a time during training, 0 for one per stage."""
        layout = replace(self.candidate.layout(self.setting), sample_batch=sample_batch)
        return build_plan(self.setting.graph, layout, pricing=pricing_of(self.setting), filler=self.filler)

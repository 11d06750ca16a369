"""One cell: a model on so many A100s with so many samples each, trained in every way that is compared."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.paper import profiles
from benchmarks.paper.fill import Fill, fill_of
from benchmarks.rivals.copies import Cache, cache_of, tuned_copies
from benchmarks.rivals.replicated import replicated_spp
from diffusionpipe.costs import Cluster
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import Baseline, best_baselines, best_of, gpipe_starts, pipeline, spp_starts
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.planner.search.search import Search, search
from diffusionpipe.units import Bytes, Seconds

MODELS = {"SD 2.1, 512 px": "sd-2.1", "ControlNet v1.0, 512 px": "controlnet-sd-1.5"}
NODE = 8
STAGES = (2, 4, 8)
"""Numbers of stages at which layouts are compared like with like."""
PIPELINE = "ours, filled: best pipeline"
BEST = "ours, filled: best of all"
UNFILLED = "ours, unfilled: same pipeline"

Found = tuple[Candidate, Proposal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which cell."""

    model: str
    devices: int
    per_device: int
    """Samples of one step on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way of training in a cell."""

    system: str
    layout: str
    step: Seconds
    bubble: float
    """Idle part of all devices' time."""
    overflow: Bytes
    """Beyond the device's memory; 0 or less: it fits."""

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return self.overflow <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SameLayout:
    """Stages of one rank each, in the same number, groups and micro-batches for all three."""

    stages: int
    ours: Entry
    unbucketed: Entry
    """Ours with the gradients of a stage summed at once, as the others do it."""
    unfilled: Entry
    gpipe: Entry
    spp: Entry

    @property
    def speedup(self) -> float | None:
        """Over the better of the two; None where ours or both of them do not fit."""
        return self._over(self.ours)

    @property
    def speedup_unbucketed(self) -> float | None:
        """The same without the gain of summing gradients in buckets."""
        return self._over(self.unbucketed)

    def _over(self, ours: Entry) -> float | None:
        rivals = [one.step for one in (self.gpipe, self.spp) if one.fits]
        return min(rivals) / ours.step if ours.fits and rivals else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Everything about one case."""

    case: Case
    frozen_over_busy: float
    """r: encoders' time over the trained part's time, of a device's samples done at once."""
    ours: tuple[Entry, ...]
    """Best of all, best pipeline, the same unfilled; a pipeline that does not fit is listed too."""
    others: tuple[Entry, ...]
    """Each at its own best sizes."""
    tuned: tuple[Entry, ...]
    """Data parallelism as people tune it, each at its own best sizes."""
    cache: Cache
    """What keeping encoder outputs on disk takes."""
    fill: Fill | None
    """Of the best pipeline; None without one."""
    same_layout: tuple[SameLayout, ...]

    @property
    def ceiling(self) -> float:
        """The most that filling gains over the same pipeline unfilled, when nothing is communicated."""
        return (1 + 2 * self.frozen_over_busy) / (1 + self.frozen_over_busy)

    def entry(self, system: str) -> Entry | None:
        """The entry of that name."""
        return next((one for one in (*self.ours, *self.others, *self.tuned) if one.system == system), None)


def setting_of(case: Case, cluster: Cluster | None = None) -> Setting:
    """Parameters, gradients, Adam's moments in float32, frozen weights as in the profile, nothing recomputed."""
    return Setting(
        profile=profiles.load(MODELS[case.model]),
        cluster=cluster or load_cluster(f"a100-80x8:{case.devices // NODE}"),
        workload=Workload(batch=case.devices * case.per_device),
    )


def measure(case: Case) -> Cell:
    """Simulate the cell."""
    return measure_in(setting_of(case), case)


def measure_in(setting: Setting, case: Case) -> Cell:
    """The same in a setting that differs from the case's own in shares or rates."""
    judge, filler = Judge(setting=setting), filler_of(setting)
    everything = search(setting, filler=filler)
    by_stages = {stages: search(setting, filler=filler, units=(stages,)) for stages in STAGES}
    found = [pair for one in (everything, *by_stages.values()) for pair in one.finalists]
    best = min((pair for pair in found if len(pair[0].starts) > 1), key=_rank, default=None)
    sums = judge.tables.table.sums(case.per_device)
    return Cell(
        case=case,
        frozen_over_busy=judge.tables.frozen_seconds / (sums.forward[-1] + sums.backward[-1]),
        ours=tuple(_ours(setting, min(found, key=_rank, default=None), best)),
        others=tuple(_of_baseline(one) for one in (*best_baselines(setting), best_of(replicated_spp, setting)) if one),
        tuned=tuple(_of_baseline(one) for one in tuned_copies(setting)),
        cache=cache_of(setting),
        fill=best and fill_of(setting, best[0].layout(setting)),
        same_layout=tuple(
            one for stages, found in by_stages.items() if (one := _same_layout(judge, filler, stages, found))
        ),
    )


def _ours(setting: Setting, fastest: Found | None, pipe: Found | None) -> Iterator[Entry]:
    """Best of all, the best pipeline with two and more stages, and that unfilled."""
    if fastest:
        yield _of_proposal(BEST, *fastest)
    if pipe:
        yield _of_proposal(PIPELINE, *pipe)
        yield _of_proposal(UNFILLED, pipe[0], propose(setting, pipe[0].layout(setting)))


def _same_layout(judge: Judge, filler: Filler, stages: int, found: Search) -> SameLayout | None:
    """The best pipeline with that many stages of one rank each, beside the others at its sizes; None without one."""
    setting = judge.setting
    finalists = [pair for pair in found.finalists if max(pair[0].replicas) == 1]
    if not any(proposal.overflow <= 0 for _, proposal in finalists):
        plain = [one.candidate for one in found.judged if max(one.candidate.replicas) == 1]
        finalists += [(one, propose(setting, one.layout(setting), filler)) for one in plain[:3]]
    best = min(finalists, key=_rank, default=None)
    if best is None:
        return None
    candidate, proposal = best
    where = [(candidate.arrangement, candidate.microbatches)]
    gpipe = pipeline(judge, "GPipe", "gpipe", gpipe_starts, where)
    spp = pipeline(judge, "1F1B + SPP", "1f1b", spp_starts, where)
    if gpipe is None or spp is None:
        return None
    at_once = replace(candidate, buckets=1)
    return SameLayout(
        stages=stages,
        ours=_of_proposal("ours, filled", candidate, proposal),
        unbucketed=_of_proposal("ours, no buckets", at_once, propose(setting, at_once.layout(setting), filler)),
        unfilled=_of_proposal("ours, unfilled", candidate, propose(setting, candidate.layout(setting))),
        gpipe=_of_baseline(gpipe),
        spp=_of_baseline(spp),
    )


def _rank(pair: Found) -> tuple[bool, Seconds]:
    return pair[1].overflow > 0, pair[1].step


def _of_proposal(system: str, candidate: Candidate, proposal: Proposal) -> Entry:
    return Entry(
        system=system,
        layout=f"{name_of(candidate)}, {sizes_of(candidate)}",
        step=proposal.step,
        bubble=proposal.timeline.bubble,
        overflow=proposal.overflow,
    )


def _of_baseline(one: Baseline) -> Entry:
    return Entry(
        system=one.name,
        layout=one.sizes,
        step=one.step,
        bubble=max(0.0, 1 - one.busy / one.step),
        overflow=one.overflow,
    )

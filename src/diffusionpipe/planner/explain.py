"""The result of a search for people: one row for each candidate, and why the winner won.

A step is an iteration and the optimizer's update after it, ours and everyone's: a rank updates the parameters that it
holds, which are all of them in data parallelism, an equal part with ZeRO-3, those of its stages in a pipeline.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from diffusionpipe.costs import Cluster
from diffusionpipe.costs.actions import without_hosts
from diffusionpipe.costs.cluster import slow_links
from diffusionpipe.costs.memory import MemoryUse
from diffusionpipe.planner.pricing.given import NOTHING
from diffusionpipe.planner.pricing.offload import encoder_bytes
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import time_to_update
from diffusionpipe.planner.rivals.baselines import Baseline, best_baselines
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import ON_HOST, name_of, sizes_of
from diffusionpipe.planner.search.pool import Judged
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.planner.search.search import Search
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Bytes, Seconds

GIB = 2**30
HOST_BOUND = 1.02
"""An iteration is host-bound if the hosts make it longer by this factor."""
MOST_NAMED = 4
"""Slow links that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate."""

    name: str
    sizes: str
    num_stages: int
    """Of its pipeline; 1 for data parallelism."""
    step: Seconds
    """Iteration and update."""
    update: Seconds
    """Of the rank with most to update; 0 if the profile does not know it."""
    samples_per_second: float
    bubble: float
    """Idle part of all devices' time."""
    exposed: Seconds
    """Time in which only encoders run."""
    memory: Bytes
    """Of the fullest device, estimated where `use` is None."""
    use: MemoryUse | None
    """What it is made of."""
    overflow: Bytes
    """Beyond the device's memory; 0 or less: it fits."""
    is_copy: bool = False
    """Whether it is another system's with the whole model on every device."""

    @property
    def fits(self) -> bool:
        """Whether every device has room for it."""
        return self.overflow <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All candidates, ours and others', and the verdict. Each group is fastest first, what does not fit last."""

    winner: Row
    simulated: tuple[Row, ...]
    """In full: every action and message."""
    estimated: tuple[Row, ...]
    """By a quick simulation, in which one pipeline stands for all copies."""
    others: tuple[Row, ...]
    """What other systems would do, estimated likewise."""
    verdict: str
    """One sentence on why the winner won."""
    unflushed: tuple[Row, ...] = ()
    """What training without a flush would reach; never the winner, because it trains with older weights."""

    @property
    def ours(self) -> tuple[Row, ...]:
        """Those that DiffusionPipe runs."""
        return (*self.simulated, *self.estimated)


def compare(setting: Setting, search: Search, *, max_estimated: int = 6) -> Comparison:
    """The comparison of a search's finalists, of which at least one fits, with what others would do."""
    assert search.winner, "nothing fits; see `advice.nothing_fits`"
    judge = Judge(setting=setting)
    winner = _proposed(setting, *search.winner)
    # The winner may stand among the finalists twice, filled and not.
    simulated = {(row.name, row.sizes): row for row in reversed([_proposed(setting, *one) for one in search.finalists])}
    simulated[winner.name, winner.sizes] = winner
    estimated: dict[tuple[str, str], Row] = {}
    for one in search.judged:
        key = name_of(one.candidate), sizes_in(setting, one.candidate)
        if len(estimated) < max_estimated and key not in {**simulated, **estimated}:  # the same with other cuts
            estimated[key] = _estimated(judge, one, search.is_filled)
    others = _sorted(_baseline(judge, one) for one in best_baselines(setting.whole or setting))
    found = _sorted(simulated.values()), _sorted(estimated.values())
    why = _why(setting, search.winner, winner, (*found[0], *found[1]), others)
    return Comparison(
        winner=winner,
        simulated=found[0],
        estimated=found[1],
        others=others,
        verdict=" ".join(filter(None, (why, slow_links_text(setting.cluster)))),
    )


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step)))


def sizes_in(setting: Setting, candidate: Candidate) -> str:
    """The same, and where the encoders are."""
    return sizes_of(candidate) + (ON_HOST if setting.workload.offload_frozen else "")


def _proposed(setting: Setting, candidate: Candidate, proposal: Proposal) -> Row:
    use = max(proposal.memory, key=lambda memory: memory.total)
    return Row(
        name=name_of(candidate),
        sizes=sizes_in(setting, candidate),
        num_stages=max(candidate.stages),
        step=proposal.step,
        update=proposal.update,
        samples_per_second=setting.workload.batch / proposal.step,
        bubble=proposal.timeline.bubble,
        exposed=proposal.exposed,
        memory=use.total,
        use=use,
        overflow=proposal.overflow,
    )


def _estimated(judge: Judge, one: Judged, is_filled: bool) -> Row:
    estimate, update = one.estimate, _update(judge, one.candidate)
    return Row(
        name=name_of(one.candidate),
        sizes=sizes_in(judge.setting, one.candidate),
        num_stages=max(one.candidate.stages),
        step=one.score + update,
        update=update,
        samples_per_second=judge.setting.workload.batch / (one.score + update),
        bubble=max(0.0, 1 - (estimate.busy + estimate.frozen) / one.score),
        exposed=max(0.0, one.score - estimate.pipeline) if is_filled else estimate.frozen,
        memory=_smallest_device(judge.setting) + estimate.overflow,
        use=None,
        overflow=estimate.overflow,
    )


def _baseline(judge: Judge, one: Baseline) -> Row:
    setting = judge.setting
    if one.candidate is not None:
        update = _update(judge, one.candidate)
    else:
        update = time_to_update(one.updated, setting.profile, setting.cluster.num_ranks)
    return Row(
        name=one.name,
        sizes=one.sizes,
        num_stages=len(one.candidate.starts) if one.candidate else 1,
        step=one.step + update,
        update=update,
        samples_per_second=setting.workload.batch / (one.step + update),
        bubble=max(0.0, 1 - one.busy / one.step),
        exposed=one.frozen,
        memory=_smallest_device(setting) + one.overflow,
        use=None,
        overflow=one.overflow,
        is_copy=one.is_copy,
    )


def _update(judge: Judge, candidate: Candidate) -> Seconds:
    """Of the worker with most to update."""
    if not judge.setting.profile.update:
        return 0.0
    starts, trained = (*candidate.starts, judge.tables.num_layers), judge.tables.table.trained
    blocks = [trained[stop] - trained[start] for start, stop in pairwise(starts)]
    held: dict[int, set[int]] = defaultdict(set)
    for stage in candidate.layout(judge.setting).generated().placement.stages:
        held[stage.worker].add(stage.weights)
    most: float = max(sum(blocks[block] for block in own) for own in held.values())
    most /= candidate.arrangement.data_parallel if candidate.sharded else 1
    return time_to_update(most, judge.setting.profile, judge.setting.cluster.num_ranks)


def _smallest_device(setting: Setting) -> Bytes:
    return min(device.memory for device in setting.cluster.devices)


def _why(
    setting: Setting,
    winner: tuple[Candidate, Proposal],
    row: Row,
    ours: tuple[Row, ...],
    others: tuple[Row, ...],
) -> str:
    candidate, proposal = winner
    rival = min((one for one in others if one.fits), key=lambda one: one.step, default=None)
    if rival is None:
        against = "no other system's layout fits in memory"
    elif rival.step >= row.step * 1.005:
        against = f"it is {rival.step / row.step:.2f} times as fast as {rival.name}, the fastest other system that fits"
    elif rival.step * 1.005 <= row.step:
        where = ", with other sizes than given" if setting.given != NOTHING else ""
        against = f"{rival.name} would be {row.step / rival.step:.2f} times as fast{where}"
    else:
        against = f"it is as fast as {rival.name}, the fastest other system that fits"
    against += _other_ways(row, ours) if candidate.backbones else ""
    reduces = max(proposal.costs.reduces, default=0.0)
    sums = f"the longest gradient sum takes {reduces * 1e3:.1f} ms, " if reduces >= 5e-5 else ""
    if candidate.workers == 1:
        if candidate.arrangement.units * candidate.arrangement.data_parallel == 1:
            return f"Use the one device: {_hidden(proposal)}.{_host_bound(proposal)}"
        which = (
            f"sharded data parallelism: {_sharded(setting, candidate, row)}"
            if candidate.sharded
            else "data parallelism: the whole model fits on every device"
        )
        return f"Use {which}; {_best_pipeline(row, ours)}{_hidden(proposal)}; {against}.{_host_bound(proposal)}"
    return (
        f"Use {row.name} with {row.sizes}: {_memory_reason(others)}devices idle {row.bubble:.1%} of the time, {sums}"
        f"and {_hidden(proposal)}; {against}.{_host_bound(proposal)}"
    )


def _other_ways(winner: Row, ours: tuple[Row, ...]) -> str:
    """How much slower the best of each other way to run two backbones is."""
    best: dict[str, Row] = {}
    for row in sorted(ours, key=lambda row: row.step):
        if row.fits and row.name != winner.name:
            best.setdefault(row.name, row)
    if not best:
        return "; no other way to run both backbones was as good or fits"
    found = [f"{row.name} {row.step / winner.step:.2f} (idle {row.bubble:.1%})" for row in best.values()]
    return f". Other ways to run both backbones take, times as long: {', '.join(found)}"


def _sharded(setting: Setting, candidate: Candidate, row: Row) -> str:
    """Which memory is in parts, and which each device holds whole."""
    assert row.use
    encoders = min(row.use.frozen, encoder_bytes(setting))
    backbone = row.use.frozen - encoders
    names = ["trained parameters", "gradients", "optimizer state"]
    names += ["average"] if row.use.ema else []
    names += ["frozen weights of the backbone"] if backbone else []
    use = row.use
    parts = use.parameters + use.gradients + use.optimizer + use.ema + use.backup + backbone
    text = (
        f"each of the {candidate.arrangement.data_parallel} devices holds a part of the {', '.join(names[:-1])} and "
        f"{names[-1]} ({parts / GIB:.2f} GiB on the fullest)"
    )
    if encoders < GIB / 200:
        return text
    which = "two encoder layers at a time" if setting.workload.offload_frozen else "the whole of the encoders"
    return f"{text} and {which} ({encoders / GIB:.2f} GiB)"


def _best_pipeline(row: Row, ours: tuple[Row, ...]) -> str:
    """How much slower the best pipeline is, if one was looked at."""
    best = min((one for one in ours if one.num_stages > 1 and one.fits), key=lambda one: one.step, default=None)
    if best is None:
        return ""
    estimated = "" if best.use else ", estimated"
    times = f"{best.step / row.step:.2f}"
    takes = f"takes {times} times as long" if times != "1.00" else "takes as long"
    return f"the best pipeline ({best.name}, {best.sizes}{estimated}) {takes}, and "


def _hidden(proposal: Proposal) -> str:
    frozen = fmean(
        sum(span.end - span.start for span in proposal.timeline.spans if span.action in encodes and span.worker == w)
        for encodes in [{action for _, action in proposal.train.actions() if str(action.op) == "ENCODE"}]
        for w in range(proposal.train.num_workers)
    )
    if not frozen:
        return "there is no frozen work"
    hidden = max(0.0, 1 - proposal.exposed / frozen)
    return f"{hidden:.0%} of the encoders' {frozen * 1e3:.1f} ms per device overlap with training"


def _host_bound(proposal: Proposal) -> str:
    """How much longer an iteration takes because hosts issue kernels more slowly than devices compute."""
    if not proposal.costs.has_hosts:
        return ""
    unhosted = simulate(proposal.train, without_hosts(proposal.costs)).makespan
    if proposal.timeline.makespan < HOST_BOUND * unhosted:
        return ""
    return (
        f" The plan is host-bound: an iteration takes {proposal.timeline.makespan * 1e3:.1f} ms and would take "
        f"{unhosted * 1e3:.1f} ms if the hosts issued their kernels in no time; use fewer, larger micro-batches."
    )


def slow_links_text(cluster: Cluster) -> str:
    """Which links of the cluster are slow, in a sentence; "" if none is."""
    slow = [
        f"{first}-{second} with {rate / 1e9:.2f} instead of {usual / 1e9:.2f} GB/s"
        for (first, second), (rate, usual) in slow_links(cluster).items()
    ]
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    return f"Slow links between ranks: {', '.join(slow[:MOST_NAMED])}{more}." if slow else ""


def _memory_reason(others: tuple[Row, ...]) -> str:
    """Whether data parallelism was out of the question."""
    copies = [one for one in others if one.is_copy]
    if copies and not any(one.fits for one in copies):
        least = min(one.overflow for one in copies)
        return f"a whole copy of the model needs {least / GIB:.1f} GiB more than a device has; "
    return ""


def unit_of(num_bytes: Bytes) -> tuple[str, Bytes]:
    """The unit in which that much memory is written, and its bytes: GiB, or MiB below one."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", 2**20)


def parts_of(use: MemoryUse, unit: Bytes) -> dict[str, float]:
    """The parts of a device's memory in a unit, with two decimals, largest first; they add up to the rounded total.

    Parts that would be 0.00 are left out.
    """
    cents = {name.replace("_", " "): size / unit * 100 for name, size in use.items().items()}
    whole = {name: int(size) for name, size in cents.items()}
    missing = round(use.total / unit * 100) - sum(whole.values())
    for name in sorted(cents, key=lambda name: whole[name] - cents[name])[:missing]:
        whole[name] += 1
    return {name: size / 100 for name, size in sorted(whole.items(), key=lambda item: -item[1]) if size}

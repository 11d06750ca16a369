"""What a search found, for people: one line for each candidate, and why the winner won.

A step is an iteration and the optimizer's update after it, ours and everyone's: a rank updates the parameters that it
holds, which are all of them in data parallelism, an equal part with ZeRO-3, those of its stages in a pipeline.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from diffusionpipe.costs.memory import MemoryUse
from diffusionpipe.planner.baselines import ON_HOST, ZERO3, Baseline, best_baselines
from diffusionpipe.planner.candidates import Candidate, Judge
from diffusionpipe.planner.given import NOTHING
from diffusionpipe.planner.pool import Judged
from diffusionpipe.planner.proposal import Proposal
from diffusionpipe.planner.search import Search, least_overflow
from diffusionpipe.planner.stage_costs import Setting, time_to_update
from diffusionpipe.units import Bytes, Seconds

GIB = 2**30
RECOMPUTE = "training.activation_checkpointing = true in a recipe, --checkpoint '*' without"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate."""

    name: str
    sizes: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All candidates, ours and others', and the verdict."""

    ours: tuple[Row, ...]
    """Simulated in full, best first; then the estimated ones."""
    others: tuple[Row, ...]
    verdict: str
    """One sentence on why the winner won; where nothing fits, by how much, and what would make it fit."""


def compare(setting: Setting, search: Search, *, max_estimated: int = 6) -> Comparison:
    """The comparison of a search's finalists with what others would do."""
    judge = Judge(setting=setting)
    finalists = [_proposed(setting, candidate, proposal) for candidate, proposal in search.finalists]
    shown = {(row.name, row.sizes) for row in finalists}
    estimated: list[Row] = []
    for one in search.judged:
        if len(estimated) == max_estimated:
            break
        key = name_of(one.candidate), sizes_in(setting, one.candidate)
        if key not in shown:  # the same with other cuts is left out
            shown.add(key)
            estimated.append(_estimated(judge, one, search.is_filled))
    others = tuple(_baseline(judge, one) for one in best_baselines(setting.whole or setting))
    winner = search.winner
    ours = (*finalists, *estimated)
    verdict = (
        _why(winner, ours, others, is_given=setting.given != NOTHING) if winner else _nothing_fits(setting, others)
    )
    return Comparison(ours=ours, others=others, verdict=verdict)


def sizes_of(candidate: Candidate) -> str:
    """A candidate's sizes in words, e.g. "4 stages (1,1,2,4 replicas) x 2 groups, 16 micro-batches"."""
    arrangement, stages = candidate.arrangement, len(candidate.starts)
    words = []
    if stages > 1:
        words.append(f"{stages} stages" + (f" on {candidate.workers} ranks" if candidate.workers < stages else ""))
        if max(candidate.replicas) > 1:
            words.append(f"({','.join(map(str, candidate.replicas))} replicas)")
    if arrangement.data_parallel > 1:
        words.append(f"x {arrangement.data_parallel} groups" if stages > 1 else f"{arrangement.data_parallel} copies")
    text = " ".join(words) or "one device"
    if stages > 1 and arrangement.adjacent > 1:
        text += " side by side"
    if candidate.microbatches > 1:
        text += f", {candidate.microbatches} micro-batches"
    return text + (f", {candidate.buckets} buckets" if candidate.buckets > 1 else "")


def sizes_in(setting: Setting, candidate: Candidate) -> str:
    """The same, and where the encoders are."""
    return sizes_of(candidate) + (ON_HOST if setting.workload.offload_frozen else "")


def name_of(candidate: Candidate) -> str:
    """What the candidate is called: its schedule, or data parallelism."""
    if len(candidate.starts) > 1:
        return candidate.schedule
    return "sharded data parallel (ours)" if candidate.sharded else "data parallel (ours)"


def _proposed(setting: Setting, candidate: Candidate, proposal: Proposal) -> Row:
    use = max(proposal.memory, key=lambda memory: memory.total)
    return Row(
        name=name_of(candidate),
        sizes=sizes_in(setting, candidate),
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
        step=one.score + update,
        update=update,
        samples_per_second=judge.setting.workload.batch / (one.score + update),
        bubble=max(0.0, 1 - (estimate.busy + estimate.frozen) / one.score),
        exposed=one.score - estimate.pipeline if is_filled else estimate.frozen,
        memory=_smallest_device(judge.setting) + estimate.overflow,
        use=None,
        overflow=estimate.overflow,
    )


def _baseline(judge: Judge, one: Baseline) -> Row:
    setting = judge.setting
    if one.candidate is not None:
        update = _update(judge, one.candidate)
    else:
        parameters = judge.table.trained[-1] / (setting.cluster.num_ranks if one.name == ZERO3 else 1)
        update = time_to_update(parameters, setting.profile, setting.cluster.num_ranks)
    return Row(
        name=one.name,
        sizes=one.sizes,
        step=one.step + update,
        update=update,
        samples_per_second=setting.workload.batch / (one.step + update),
        bubble=max(0.0, 1 - one.busy / one.step),
        exposed=one.frozen,
        memory=_smallest_device(setting) + one.overflow,
        use=None,
        overflow=one.overflow,
    )


def _update(judge: Judge, candidate: Candidate) -> Seconds:
    """Of the worker with most to update."""
    if not judge.setting.profile.update:
        return 0.0
    starts, trained = (*candidate.starts, judge.num_layers), judge.table.trained
    blocks = [trained[stop] - trained[start] for start, stop in pairwise(starts)]
    held: dict[int, set[int]] = defaultdict(set)
    for stage in candidate.layout(judge.setting).generated().placement.stages:
        held[stage.worker].add(stage.weights)
    most: float = max(sum(blocks[block] for block in own) for own in held.values())
    most /= candidate.arrangement.data_parallel if candidate.sharded else 1
    return time_to_update(most, judge.setting.profile, judge.setting.cluster.num_ranks)


def _smallest_device(setting: Setting) -> Bytes:
    return min(device.memory for device in setting.cluster.devices)


def _why(winner: tuple[Candidate, Proposal], ours: tuple[Row, ...], others: tuple[Row, ...], *, is_given: bool) -> str:
    (candidate, proposal), row = winner, ours[0]
    fitting = [one for one in others if one.overflow <= 0]
    rival = min(fitting, key=lambda one: one.step, default=None)
    if rival is None:
        against = "nothing else fits in memory"
    elif rival.step >= row.step * 1.005:
        against = f"it is {rival.step / row.step:.2f} times as fast as {rival.name}, the best alternative that fits"
    elif rival.step * 1.005 <= row.step:
        where = ", with other sizes than given" if is_given else ""
        against = f"{rival.name} would be {row.step / rival.step:.2f} times as fast{where}"
    else:
        against = f"it is as fast as {rival.name}, the best alternative that fits"
    reduces = max(proposal.costs.reduces, default=0.0)
    if len(candidate.starts) == 1:
        if candidate.arrangement.units * candidate.arrangement.data_parallel == 1:
            return f"Use the one device: {_hidden(proposal)}."
        which = (
            "sharded data parallelism: every device holds a part of the model"
            if candidate.sharded
            else "data parallelism: the whole model fits on every device"
        )
        return f"Use {which}, {_best_pipeline(row, ours)}{_hidden(proposal)}; {against}."
    return (
        f"Use {row.name} with {row.sizes}: {_memory_reason(others)}devices idle {row.bubble:.1%} of the time, the "
        f"longest gradient sum takes {reduces * 1e3:.1f} ms, and {_hidden(proposal)}; {against}."
    )


def _best_pipeline(row: Row, ours: tuple[Row, ...]) -> str:
    """How much slower the best pipeline is, if one was looked at."""
    pipelines = [one for one in ours if one.name != row.name and one.overflow <= 0]
    if not pipelines:
        return ""
    best = min(pipelines, key=lambda one: one.step)
    return f"the best pipeline ({best.name}, {best.sizes}) takes {best.step / row.step:.2f} times as long, and "


def _hidden(proposal: Proposal) -> str:
    frozen = fmean(
        sum(span.end - span.start for span in proposal.timeline.spans if span.action in encodes and span.worker == w)
        for encodes in [{action for _, action in proposal.train.actions() if str(action.op) == "ENCODE"}]
        for w in range(proposal.train.num_workers)
    )
    if not frozen:
        return "there is no frozen work"
    hidden = max(0.0, 1 - proposal.exposed / frozen)
    return f"{hidden:.0%} of the encoders' {frozen * 1e3:.1f} ms a device run beside training"


def _memory_reason(others: tuple[Row, ...]) -> str:
    """Whether data parallelism was out of the question."""
    copies = [one for one in others if one.name.startswith("data parallel")]
    if copies and all(one.overflow > 0 for one in copies):
        least = min(one.overflow for one in copies)
        return f"a whole copy of the model misses the device's memory by {least / GIB:.1f} GiB; "
    return ""


def _nothing_fits(setting: Setting, others: tuple[Row, ...]) -> str:
    """By how much nothing fits, and the first of the usual ways that would help."""
    nearest = least_overflow(setting)
    if nearest is None:
        return "No layout cuts this batch."
    candidate, proposal = nearest
    worker = max(range(len(proposal.memory)), key=lambda w: proposal.memory[w].total)
    items = sorted(proposal.memory[worker].items().items(), key=lambda item: -item[1])[:3]
    made_of = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for name, size in items)
    text = (
        f"No layout fits: the nearest, {name_of(candidate)} with {sizes_in(setting, candidate)}, misses the memory of "
        f"worker {worker} by {proposal.overflow / GIB:.1f} GiB ({made_of})."
    )
    helps = []
    if setting.workload.checkpointed != ("*",):
        again = replace(setting, workload=replace(setting.workload, checkpointed=("*",)))
        recomputed = least_overflow(again)
        if recomputed and recomputed[1].overflow <= 0:
            helps.append(f"recompute all layers in the backward ({RECOMPUTE})")
    largest = max(proposal.memory, key=lambda memory: memory.total).total
    helps.append(f"devices of {largest / GIB:.0f} GiB")
    fitting = [one for one in others if one.overflow <= 0]
    if fitting:
        helps.append(f"{min(fitting, key=lambda one: one.step).name}, which DiffusionPipe does not run")
    if setting.given != NOTHING:
        helps.append("sizes left to the search instead of given")
    helps.append("more devices, a smaller batch, or narrower optimizer state")
    return f"{text} What would fit: {'; '.join(helps)}."

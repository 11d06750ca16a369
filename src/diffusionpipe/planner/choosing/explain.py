"""Explains the result of a search: a table with a row for each candidate, and a sentence on why the winner won."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from diffusionpipe.costs import Cluster
from diffusionpipe.costs.actions import without_hosts
from diffusionpipe.costs.cluster import slow_links
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.rows import GIB, Row, baseline_row, estimated_row, row_of, sizes_in
from diffusionpipe.planner.pricing.given import NOTHING
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import encoder_bytes
from diffusionpipe.planner.rivals.baselines import DIFFERENCES, best_baselines
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.planner.search.search import Search
from diffusionpipe.simulator import simulate

HOST_BOUND = 1.02
"""An iteration is host-bound if the hosts make it longer by this factor."""
CLEAR = 1.005
"""A system is called faster than another from this factor on."""
MAX_ESTIMATED = 6
"""The most layouts that are shown though they were only estimated."""
MOST_NAMED = 4
"""The most slow links that a remark names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A fact to read about a plan before it is used, and the command for another plan, if there is one."""

    text: str
    """The remark in a sentence or two."""
    way: str = ""
    """The command or the options for the other plan that the text ends with; "" where there is none."""

    def __str__(self) -> str:
        return f"{self.text} {self.way}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedCounts:
    """The number of layouts that were looked at; one that is filled and the same unfilled count twice."""

    estimated: int
    """The number of layouts that were estimated."""
    simulated: int
    """The number of layouts that were simulated in full."""
    fitting: int
    """The number of simulated layouts for which all ranks have the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table of all candidates, ours and others', with the verdict.

    Each group is fastest first, rows that do not fit last.
    """

    winner: Row
    simulated: tuple[Row, ...]
    """Rows of the candidates that were simulated in full: every action and message."""
    estimated: tuple[Row, ...]
    """Rows of the candidates that a quick simulation estimated, in which one pipeline stands for all copies."""
    others: tuple[Row, ...]
    """Rows of other systems, estimated in the same way."""
    verdict: str
    """One sentence on why the winner won."""
    fewer: tuple[Row, ...] = ()
    """The row of a plan on fewer devices, if that is faster."""
    remarks: tuple[Remark, ...] = ()
    unflushed: tuple[Row, ...] = ()
    """Rows of training without a flush; never the winner, because it trains with older weights."""
    tried: TriedCounts | None = None
    """The numbers of layouts that were looked at; None: not counted."""

    @property
    def ours(self) -> tuple[Row, ...]:
        """The rows of the candidates that DiffusionPipe can run, simulated ones first."""
        return (*self.simulated, *self.estimated)


def compare(
    setting: Setting,
    search: Search,
    *,
    chosen: tuple[Candidate, Proposal] | None = None,
    beside: Sequence[Row] = (),
    remarks: Sequence[Remark] = (),
) -> Comparison:
    """The comparison of the layouts that a search looked at, at least one of which fits, with other systems' layouts.

    `chosen` is the winner of the table; None: the fastest layout of the search. `beside`: rows of simulated layouts of
    other searches. At most `MAX_ESTIMATED` layouts are shown that were only estimated.

    Raises:
        AssertionError: nothing fits, and none is chosen.
    """
    chosen = chosen or search.winner
    assert chosen, "nothing fits; see `advice.nothing_fits`"
    judge = Judge(setting=setting)
    winner = row_of(setting, *chosen)
    # A layout may be among the finalists twice, filled and not.
    rows = (*(row_of(setting, *one) for one in search.finalists if one != chosen), *beside, winner)
    # Of rows with one name and sizes the last one stays: the fastest, and the winner before all.
    simulated = {(row.name, row.sizes): row for row in sorted(rows, key=lambda row: (row is winner, -row.step))}
    estimated: dict[tuple[str, str], Row] = {}
    for one in search.judged:
        key = name_of(one.candidate), sizes_in(setting, one.candidate)
        if len(estimated) < MAX_ESTIMATED and key not in {**simulated, **estimated}:  # the same with other cuts
            estimated[key] = estimated_row(judge, one, search.is_filled)
    others = _sorted(baseline_row(judge, one) for one in best_baselines(setting.whole or setting))
    found = _sorted(simulated.values()), _sorted(estimated.values())
    why = _why(setting, chosen, winner, (*found[0], *found[1]), others)
    return Comparison(
        winner=winner,
        simulated=found[0],
        estimated=found[1],
        others=others,
        verdict=" ".join(filter(None, (why, slow_links_text(setting.cluster)))),
        # Sizes that are given slow the plan down by themselves, as the verdict says.
        remarks=(*remarks, *(_faster_others(winner, others) if (setting.whole or setting).given == NOTHING else ())),
    )


def _faster_others(winner: Row, others: Iterable[Row]) -> Iterator[Remark]:
    """A remark for each other system that fits and is listed as clearly faster than the plan."""
    for row in others:
        if row.fits and row.step * CLEAR <= winner.step:
            why = DIFFERENCES.get(
                row.name, "DiffusionPipe runs such layouts too; the time in the table is an estimate."
            )
            yield Remark(text=f"{row.name} is listed as {winner.step / row.step:.2f} times as fast as the plan. {why}")


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step)))


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
        # Others need a batch that all devices share equally.
        problem = "fits in memory" if others else "shares this batch over these devices"
        against = f"no other system's layout {problem}"
    elif rival.step >= row.step * CLEAR:
        against = f"it is {rival.step / row.step:.2f} times as fast as {rival.name}, the fastest other system that fits"
    elif rival.step * CLEAR <= row.step:
        where = ", with other sizes than given" if (setting.whole or setting).given != NOTHING else ""
        against = f"{rival.name} would be {row.step / rival.step:.2f} times as fast{where}"
    else:
        against = f"it is as fast as {rival.name}, the fastest other system that fits"
    against += _other_ways(row, ours) if candidate.backbones else ""
    reduces = max(proposal.costs.reduces, default=0.0)
    # A shorter sum would read 0.0 ms.
    sums = f"the longest gradient sum takes {reduces * 1e3:.1f} ms, " if reduces >= 5e-5 else ""
    if candidate.workers == 1:
        if candidate.arrangement.units * candidate.arrangement.data_parallel == 1:
            return f"Use the one device: {_hidden(proposal)}.{_host_bound(proposal)}"
        match candidate.sharded:
            case Sharded.NONE:
                which = "data parallelism: the whole model fits on every device"
            case Sharded.OPTIMIZER:
                which = f"data parallelism with optimizer states in parts: {_with_owners(row)}"
            case Sharded.ALL:
                which = f"sharded data parallelism: {_sharded(setting, candidate, row)}"
        return f"Use {which}; {_best_pipeline(row, ours)}{_hidden(proposal)}; {against}.{_host_bound(proposal)}"
    return (
        f"Use {row.name} with {row.sizes}: {_memory_reason(others)}devices idle {row.bubble:.1%} of the time, {sums}"
        f"and {_hidden(proposal)}; {against}.{_host_bound(proposal)}"
    )


def _other_ways(winner: Row, ours: tuple[Row, ...]) -> str:
    """Words that say how much slower the best layout of each other way to run two backbones is."""
    best: dict[str, Row] = {}
    for row in sorted(ours, key=lambda row: row.step):
        if row.fits and row.name != winner.name:
            best.setdefault(row.name, row)
    if not best:
        return "; no other way to run both backbones was as good or fits"
    found = [f"{row.name} {row.step / winner.step:.2f} (idle {row.bubble:.1%})" for row in best.values()]
    return f". Other ways to run both backbones take, times as long: {', '.join(found)}"


def _with_owners(row: Row) -> str:
    """Words that say which memory each device holds whole and which in parts, if optimizer states are in parts."""
    assert row.use
    parts = row.use.optimizer + row.use.ema
    names = "optimizer state and average" if row.use.ema else "optimizer state"
    return (
        f"every device holds all parameters and gradients ({(row.use.parameters + row.use.gradients) / GIB:.2f} GiB) "
        f"and a part of the {names} ({parts / GIB:.2f} GiB on the fullest)"
    )


def _sharded(setting: Setting, candidate: Candidate, row: Row) -> str:
    """Words that say which memory each device holds in parts and which whole, in sharded data parallelism."""
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
    if encoders < GIB / 200:  # less would read 0.00 GiB
        return text
    which = "two encoder layers at a time" if setting.workload.encoders.brings else "the whole of the encoders"
    return f"{text} and {which} ({encoders / GIB:.2f} GiB)"


def _best_pipeline(row: Row, ours: tuple[Row, ...]) -> str:
    """Words that say how much slower the best pipeline is; "" if no pipeline was looked at that fits."""
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
    """A sentence that says how much longer slow hosts make an iteration; "" if the plan is not host-bound."""
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
    """A sentence that names up to 4 of the cluster's slow links with their rates; "" if none is slow."""
    slow = [
        f"{first}-{second} with {rate / 1e9:.2f} instead of {usual / 1e9:.2f} GB/s"
        for (first, second), (rate, usual) in slow_links(cluster).items()
    ]
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    return f"Slow links between ranks: {', '.join(slow[:MOST_NAMED])}{more}." if slow else ""


def _memory_reason(others: tuple[Row, ...]) -> str:
    """Words that say how much memory copies of the whole model lack; "" if some of these layouts fit."""
    copies = [one for one in others if one.is_copy]
    if copies and not any(one.fits for one in copies):
        least = min(one.overflow for one in copies)
        return f"a whole copy of the model needs {least / GIB:.1f} GiB more than a device has; "
    return ""

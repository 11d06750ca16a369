"""Makes table rows of training without a flush, which the planner shows but never chooses by itself.

Where no batch waits for the one before it, the slowest stage sets the pace, as in PipeDream's objective (Narayanan et
al., SOSP 2019, section 3.1). For stages s of an arrangement with m micro-batches a step:

    period >= max over s of  m (F_s + B_s) + (what a rank does once a step: encoding, gradient sum, update)

With fills the ranks with less work encode more, and all work shared equally is a bound too (`window_fills`).

Sizes are tried in the order of this bound, with the cuts that make the slowest stage fastest. The best are simulated in
full: their windows, every message in its queue, until they repeat. The fastest that fits in memory is shown. There are
no bubbles, so a rank's update and without fills its share of the frozen work count as parts of its backwards. Messages
of frozen outputs are counted only with fills. A gradient sum delays the step after it, so it is added too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from diffusionpipe.costs import Costs
from diffusionpipe.holding import Item
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Op, Schedule
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.ir.versions import Versions, staleness_of
from diffusionpipe.passes import with_versions
from diffusionpipe.planner.assembly.build import build_window
from diffusionpipe.planner.assembly.layout import Blocks, Filler, Layout
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.choosing.rows import Row
from diffusionpipe.planner.filling.shares import idle_level
from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.pricing.layer_table import checkpointed_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import time_to_update, trained_parameters
from diffusionpipe.planner.pricing.window_costs import window_costs, window_memory
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.naming import sizes_of
from diffusionpipe.planner.search.proposal import pricing_of, propose
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.simulator import simulate
from diffusionpipe.simulator.steady import Steady, steady
from diffusionpipe.timing.memory import peak_memory
from diffusionpipe.units import Bytes, Seconds

FAMILY = "1f1b"
MOST_STAGES = 16
"""Longer pipelines are left out: a window of p stages takes a simulation of about p² micro-batches."""
MOST_FILLED_STAGES = 8
"""Longer pipelines are left out with fills: each worker sends frozen outputs to every other one, for each
micro-batch."""
MOST_MICROBATCHES = 32
MOST_TRIED = 4
"""The most layouts that are simulated, both of those with many micro-batches and of those with few."""
GAIN = 0.01
"""Fewer micro-batches than stages mean older weights: they are shown where they save this part of the period."""
ROWS = (Versions.STASHED, Versions.DELAYED, Versions.NEWEST, Versions.VERTICAL, Versions.PREDICTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """A candidate without a flush, with a lower bound of the time from one batch to the next."""

    bound: Seconds
    candidate: Candidate

    @property
    def is_young(self) -> bool:
        """Whether a batch has at least as many micro-batches as there are stages, so that most weights are new."""
        return self.candidate.microbatches >= self.candidate.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A candidate's window without a flush, with the figures that are the same for each kind of versions."""

    candidate: Candidate
    window: Schedule
    blocks: Blocks
    steady: Steady
    """The simulated times of the window when they repeat."""
    update: Seconds
    """The longest update of a stage."""
    flushed: tuple[MemoryUse, ...]
    """The memory of each rank with a flush."""
    unrolled: tuple[MemoryUse, ...]
    """The memory of each rank without a flush, as far as a window tells: activations and messages."""
    rows: tuple[Bytes, ...]
    """The frozen outputs of one batch, by rank."""


def unflushed(setting: Setting, filler: Filler | None = None) -> tuple[Row, ...]:
    """The table rows of training without a flush, the ones that fit first; of each part the fastest first.

    () if the model cannot train without a flush, or if the given sizes exclude it. `filler`: places the frozen work;
    None: each batch is encoded before its first forward.

    All rows but one have at least as many micro-batches as stages: the fastest sizes that fit `stashed`, or the fastest
    if none fits. One more `stashed` row has fewer micro-batches, where these save 1 % even without fills.
    """
    setting = setting.whole or setting
    given, graph = setting.given, setting.graph
    is_chain = given.schedule in (None, FAMILY)
    is_plain = not given.is_sharded and (given.encoders is None or not storage_of(given.encoders).brings)
    if len(graph.backbones) > 1 or graph.probes or not is_plain or not is_chain:
        return ()
    tables = Tables(setting=setting)
    sizes = sorted(_sizes(tables, filler), key=lambda one: one.bound)
    young = _fastest(tables, filler, [one for one in sizes if one.is_young])
    limit = float("inf") if young is None else (1 - GAIN) * float(young.steady.period)
    # Windows of few micro-batches hold many batches at once: with fills their simulation would take minutes.
    unfilled = sorted(_sizes(tables, None), key=lambda one: one.bound) if filler else sizes
    other = _fastest(tables, None, [one for one in unfilled if not one.is_young], limit)
    rows = [row for row in (_row(setting, young, kind) for kind in ROWS) if row] if young else []
    if other and float(other.steady.period) < limit:
        rows += [row for row in [_row(setting, other, Versions.STASHED)] if row]
    return tuple(sorted(rows, key=lambda row: (not row.fits, row.step)))


def _sizes(tables: Tables, filler: Filler | None) -> Iterator[_Sizes]:
    """A candidate for each arrangement as a pipeline and each number of micro-batches that divides the batch."""
    setting, given, batch = tables.setting, tables.setting.given, tables.setting.workload.batch
    for arrangement in arrangements(setting.cluster):
        stages, groups = arrangement.units, arrangement.data_parallel
        is_asked = given.allows(units=stages, data_parallel=groups)
        most = MOST_FILLED_STAGES if filler else MOST_STAGES
        if not (is_asked and 2 <= stages <= min(most, tables.num_layers)) or batch % groups:
            continue
        rows = batch // groups
        counts = [given.microbatches] if given.microbatches else range(1, min(rows, MOST_MICROBATCHES) + 1)
        for count in counts:
            if rows % count == 0:
                yield _cut(tables, arrangement, count, filler)


def _cut(tables: Tables, arrangement: Arrangement, count: int, filler: Filler | None) -> _Sizes:
    """The candidate with `count` micro-batches and the cuts whose slowest stage is fastest, with its bound."""
    setting = tables.setting
    ground = tables.ground(arrangement)
    times = tables.table.sums(tables.unit_samples(arrangement, count), 1).steps()
    starts = balanced_cuts(times, arrangement.units, ground.speeds)
    stops = (*starts[1:], len(times))
    encoding = _encoding(tables, filler)
    trained, profile, ranks = tables.table.trained, setting.profile, setting.cluster.num_ranks
    busy = [
        (count * sum(times[start:stop]) + encoding) / speed
        + tables.reduction(ground, start, stop, [unit])
        + time_to_update(trained[stop] - trained[start], profile, ranks)
        for unit, (start, stop, speed) in enumerate(zip(starts, stops, ground.speeds, strict=True))
    ]
    bound = max(busy)
    if filler:
        work = tables.encoding(setting.workload.batch // arrangement.data_parallel)
        bound = idle_level(bound, busy, work, dict(enumerate(ground.speeds)))
    candidate = Candidate(
        arrangement=arrangement,
        schedule=FAMILY,
        microbatches=count,
        starts=starts,
        replicas=(1,) * arrangement.units,
    )
    return _Sizes(bound=bound, candidate=candidate)


def _encoding(tables: Tables, filler: Filler | None) -> Seconds:
    """The seconds of frozen work that each rank does outside fills: an equal share of all, or 0 with a filler."""
    return 0.0 if filler else tables.encoding(-(-tables.setting.workload.batch // tables.setting.cluster.num_ranks))


def _fastest(
    tables: Tables, filler: Filler | None, sizes: list[_Sizes], limit: Seconds = float("inf")
) -> _Window | None:
    """The window of the fastest candidate that fits with stashed weights; if none fits, the fastest window.

    `sizes` ascend by their bounds; the ones whose bound reaches `limit` are left out. None if no one is left.
    """
    fitting, others = list[_Window](), list[_Window]()
    for one in sizes[:MOST_TRIED]:
        # Bounds ascend: no later size can be faster than the best, or than the limit.
        if one.bound >= min([limit, *(float(known.steady.period) for known in fitting)]):
            break
        made = _made(tables, filler, one.candidate)
        row = _row(tables.setting, made, Versions.STASHED)
        assert row, "these weights need nothing else"
        (fitting if row.fits else others).append(made)
    return min(fitting or others, key=lambda made: made.steady.period, default=None)


def _made(tables: Tables, filler: Filler | None, candidate: Candidate) -> _Window:
    """The window of a candidate, simulated in full."""
    setting = tables.setting
    layout = candidate.layout(setting)
    given = replace(layout, versions=Versions.STASHED)
    window, blocks = build_window(setting.graph, given, pricing=pricing_of(setting), filler=filler)
    price, update = _prices(tables, filler, layout, blocks)

    def held(batches: int) -> tuple[MemoryUse, ...]:
        unrolled = unroll(window, batches)
        return peak_memory(
            unrolled,
            simulate(unrolled, price(unrolled)),
            blocks,
            profile=setting.profile,
            ledger=setting.ledger,
            checkpointed=checkpointed_layers(setting.workload, setting.graph.backbone_layers),
        )

    flushed = propose(setting, layout).memory
    return _Window(
        candidate=candidate,
        window=window,
        blocks=blocks,
        steady=steady(window, price),
        update=update,
        flushed=flushed,
        unrolled=held(2 * window.lead + 2),
        rows=tuple(use.frozen_outputs for use in (held(1) if filler else flushed)),
    )


def _prices(
    tables: Tables, filler: Filler | None, layout: Layout, blocks: Blocks
) -> tuple[Callable[[Schedule], Costs], Seconds]:
    """(function that gives the costs of an unrolled schedule, seconds of the longest update of a stage)."""
    setting = tables.setting
    profile, ranks = setting.profile, setting.cluster.num_ranks
    encoding = _encoding(tables, filler)
    updates = [time_to_update(trained_parameters(setting.graph, layers), profile, ranks) for layers in blocks[:-1]]

    def price(unrolled: Schedule) -> Costs:
        batches = unrolled.num_microbatches() // layout.microbatches
        return window_costs(unrolled, blocks, layout.mesh, setting, batches=batches, encoding=encoding)

    return price, max(updates)


def _row(setting: Setting, made: _Window, kind: Versions) -> Row | None:
    """The table row of a window with one kind of versions.

    None if the kind needs more micro-batches, or an optimizer with a state from which weights can be predicted.
    """
    candidate = made.candidate
    # Weights one step old suffice for forwards that lead by one batch at most.
    if kind is Versions.DELAYED and candidate.microbatches < candidate.workers - 1:
        return None
    if kind is Versions.PREDICTED and not setting.workload.width(Item.OPTIMIZER):  # nothing to predict from
        return None
    window = with_versions(made.window, kind, 1)
    memory = _memory(made, window)
    use = max(memory, key=lambda one: one.total)
    mesh, devices = candidate.arrangement.mesh, setting.cluster.devices
    overflow = max(memory[mesh.place(rank)[1]].total - devices[rank].memory for rank in range(mesh.num_ranks))
    period = float(made.steady.period)
    return Row(
        name=str(kind),
        sizes=f"{sizes_of(candidate)}, {_age(window)}{', filled' if window.fills else ''}",
        num_stages=candidate.workers,
        step=period,
        update=made.update,
        samples_per_second=setting.workload.batch / period,
        bubble=max(0.0, float(made.steady.bubble)),
        exposed=0.0,
        memory=use.total,
        use=use,
        overflow=overflow,
    )


def _memory(made: _Window, window: Schedule) -> tuple[MemoryUse, ...]:
    """The memory of each rank that trains with the versions of `window`, by rank of a pipeline."""
    uses = [
        replace(flushed, activations=unrolled.activations, messages=unrolled.messages)
        for flushed, unrolled in zip(made.flushed, made.unrolled, strict=True)
    ]
    return window_memory(window, uses, made.rows)


def _age(window: Schedule) -> str:
    """Words for the age in steps of the weights that forwards read: "age MEAN (at most MOST)"."""
    ages = [age for (_, op), row in staleness_of(window).items() if op is Op.F for age in row]
    mean, most = fmean(ages), max(ages)
    return f"age {most}" if mean == most else f"age {mean:.2g} (at most {most})"

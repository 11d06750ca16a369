"""Plans the fills of an iteration: which worker encodes which samples of the next batch, in which waits and chunks.

        worker 0   F F F F vvvvvvvvv B B B B            v: fills in the waits that the schedule leaves,
        worker 1   vvv F F F vv B F B B B vvv           also while others still reduce their gradients;
        worker 2   vvvvvv F B F B F B F B vvvvvvvv|v    what fits nowhere runs at the end and is exposed

Own algorithm. Each worker takes a share of the samples and runs all frozen layers on it, in chunks, so nothing is
exchanged between layers (DiffusionPipe, Tian et al., MLSys 2024, https://arxiv.org/abs/2405.01248, instead spreads
every layer over the devices that are idle together; see `paper`). Three steps, each for several chunk sizes:

1. shares in proportion to idle time, then samples move from the worker that ends last to where they end first;
2. in each worker: waits in order of time, as many layers as fit, then a part of the chunk's samples of the next layer;
3. only if something is exposed then: pieces may outlast a wait and delay compute, up to latest start times; the best
   results are polished by moving fills on the critical path, and a result that is then still longer than `FAR` bounds
   and a sample goes through a longer local search (`annealing`).

Without step 3 no compute starts later than without fills. Invariants: every layer runs once on every sample; the time
is never below `fill_bound`, and the same that the simulator gives for `insert_fills` with these fills.

        worker 0   F0 F1 vvvttt B0 F2 B1 B2         6 samples, 1/4 for each in either layer: [1] three on each worker,
        worker 1   vvvt F0 B0 F1 B1 F2 B2 tt        [2] the wait of 1 holds layer v of all three, and t of one of them

>>> from diffusionpipe.costs import StageCosts
>>> from diffusionpipe.schedules import one_f_one_b
>>> costs = Costs(stages=(StageCosts(forward=1, backward=2),) * 2)
>>> frozen = FrozenLayers(components=("v", "t"), forward=lambda layer, samples: samples / 4)
>>> plan = plan_fills(one_f_one_b(2, 3, 2), costs, frozen)
>>> plan.shares, plan.unfilled, plan.iteration
((3, 3), 12, 12)
>>> [(fill.position, fill.component, len(fill.samples)) for fill in plan.fills[1]]
[(0, 'v', 3), (0, 't', 1), (6, 't', 2)]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Schedule
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.filling.annealing import annealed
from diffusionpipe.planner.filling.compute_graph import compute_graph
from diffusionpipe.planner.filling.fill_queue import placed
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers, check_options, frozen_layers
from diffusionpipe.planner.filling.polish import polished
from diffusionpipe.planner.filling.shares import (
    CLOSE,
    Case,
    Packing,
    Visits,
    bound_of,
    hosts_of,
    idle_level,
    pack_unshifted,
    seconds_a_sample,
)
from diffusionpipe.planner.filling.shifting import FURTHER, USUAL, Policy, shifted_packings
from diffusionpipe.planner.pricing.stage_costs import FREE
from diffusionpipe.units import Seconds

__all__ = ["FillOptions", "FillPlan", "FrozenLayers", "fill_bound", "fill_costs", "frozen_layers", "plan_fills"]

MAX_SHIFTED = 2
"""The number of chunk sizes for which delaying compute is tried."""
MAX_POLISHED = 6
"""The number of packings from which the local search starts."""
FAR = 1.02
"""An iteration longer than its bound by this factor is worth a longer search."""
SHIFTING_VISITS = 18_000
FURTHER_VISITS = 90_000
POLISHING_VISITS = 40_000
ANNEALING_VISITS = 12_000_000
"""The most events that a search visits in all its trials: of shifting, shifting further, polishing and annealing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPlan:
    """The fills of an iteration, and the times and bubbles that result from them."""

    fills: Mapping[int, tuple[PlacedFill, ...]]
    """Worker -> its fills in the order in which they run, as `insert_fills` takes them."""
    seconds: tuple[Seconds, ...]
    """Time of each fill, worker by worker: `Costs.fills` of the filled schedule."""
    shares: tuple[int, ...]
    """Samples that each worker encodes."""
    chunk: int
    """The most samples that go through the layers together."""
    iteration: Seconds
    """Predicted time of the filled iteration."""
    unfilled: Seconds
    """Time of the iteration without frozen work."""
    bound: Seconds
    """max(unfilled, (compute + frozen work of all workers) / workers): no fill with this frozen work is faster."""
    busy: Seconds
    """Time that all workers compute, added up, in seconds, without frozen work."""
    is_shifted: bool
    """Whether some compute starts later than without fills."""

    @property
    def frozen(self) -> Seconds:
        """The seconds of frozen work of all workers together."""
        return sum(self.seconds)

    @property
    def exposed(self) -> Seconds:
        """The seconds that the frozen work adds to the iteration."""
        return self.iteration - self.unfilled

    @property
    def bubble_before(self) -> float:
        """The idle part, 0 to 1, of all workers' time in the iteration without frozen work."""
        return 1.0 - self.busy / (len(self.shares) * self.unfilled)

    @property
    def bubble_after(self) -> float:
        """The idle part, 0 to 1, of all workers' time in the filled iteration."""
        return 1.0 - (self.busy + self.frozen) / (len(self.shares) * self.iteration)


def plan_fills(schedule: Schedule, costs: Costs, frozen: FrozenLayers, options: FillOptions | None = None) -> FillPlan:
    """The fills of one iteration that make it shortest, of the ones that the algorithm of this module finds.

    Args:
        schedule: compute and reductions, as `insert_fills` takes it, or also messages; a reduction counts until it
            ends.
        costs: the costs of that schedule.
        frozen: the layers; keep the object between calls, it remembers times.
        options: chunk sizes, hosts, speeds; None for the defaults.

    Raises:
        ConfigError: the options do not fit the layers and workers.
        ScheduleError: the schedule has fills already, or gets stuck.
    """
    case = case_of(schedule, costs, frozen, options)
    return plan_of(case, _best(case))


def case_of(schedule: Schedule, costs: Costs, frozen: FrozenLayers, options: FillOptions | None) -> Case:
    """The arguments of `plan_fills` as a checked case, with the graph of the schedule.

    Raises:
        ConfigError: the options do not fit.
        ScheduleError: the schedule has fills already, or gets stuck.
    """
    options = options or FillOptions()
    check_options(options, frozen, schedule.num_workers)
    batch = schedule.placement.num_samples
    return Case(graph=compute_graph(schedule, costs), frozen=frozen, options=options, batch=batch)


def _best(case: Case) -> Packing:
    """The fastest packing that is found over all chunk sizes; of equally fast ones the one with least frozen work."""
    packings: list[Packing] = []
    for chunk in case.options.allowed_chunks(case.batch):
        if packings and chunk >= max(packings[-1].shares):  # makes the same chunks as the size before
            continue
        packings.append(pack_unshifted(case, chunk))  # [1], [2]
    packings.sort(key=_rank)
    unshifted, best = tuple(packings), packings[0]
    if not case.options.is_thorough or best.makespan <= bound_of(case, best) * CLOSE:
        return best
    packings += _shifted(case, packings[:MAX_SHIFTED], USUAL, Visits(left=SHIFTING_VISITS))
    best = min(packings, key=_rank)
    if best.makespan > bound_of(case, best) * FAR:
        packings += _shifted(case, unshifted, FURTHER, Visits(left=FURTHER_VISITS))
    # Of equal times and shares the last one stays: the one with the least frozen work.
    starts = {(packing.makespan, packing.shares): packing for packing in sorted(packings, key=_rank, reverse=True)}
    visits = Visits(left=POLISHING_VISITS)
    chosen = sorted(starts.values(), key=_rank)[:MAX_POLISHED]
    best = min((polished(case, start, visits) for start in chosen), key=_rank)
    # A sample's time above the bound is as near as whole samples may come.
    enough = FAR * bound_of(case, best) + case.seconds_a_sample(1)
    return annealed(case, best, visits=ANNEALING_VISITS, enough=enough) if best.makespan > enough else best


def _shifted(case: Case, packings: Sequence[Packing], policies: Sequence[Policy], visits: Visits) -> list[Packing]:
    return [found for packing in packings for found in shifted_packings(case, packing, policies, visits)]


def _rank(packing: Packing) -> tuple[Seconds, Seconds]:
    """(seconds of the iteration, seconds of frozen work), by which packings are compared; less is better."""
    return packing.makespan, sum(packing.used)


def plan_of(case: Case, packing: Packing) -> FillPlan:
    """The fill plan with the pieces of a packing as fills, and its times."""
    graph = case.graph
    fills, seconds, first = {}, [], 0
    for worker, (share, pieces) in enumerate(zip(packing.shares, packing.pieces, strict=True)):
        found = placed(pieces, case.frozen, case.options, worker=worker, first=first)
        first += share
        if found:
            fills[worker] = tuple(fill for fill, _ in found)
            seconds += [time for _, time in found]
    return FillPlan(
        fills=fills,
        seconds=tuple(seconds),
        shares=packing.shares,
        chunk=packing.chunk,
        iteration=packing.makespan,
        unfilled=graph.makespan,
        bound=max(graph.makespan, (sum(graph.busy) + sum(seconds)) / graph.num_workers),
        busy=sum(graph.busy),
        is_shifted=packing.is_shifted,
    )


def fill_bound(
    unfilled: Seconds, busy: Sequence[Seconds], batch: int, frozen: FrozenLayers, options: FillOptions | None = None
) -> Seconds:
    """A lower bound in seconds of the filled iteration: hosts' idle time takes the batch at its cheapest chunk size.

    `unfilled`: the seconds without frozen work, or a lower bound of them; `busy`: the compute of each worker in
    seconds. It is quickly computed, so a search can leave out layouts by it. It is a bound if the least time of one
    sample is at a chunk size or at 1, as it is if times are linear between these sizes.
    """
    options = options or FillOptions()
    chunks = {1, *options.allowed_chunks(batch)}
    rate = min(seconds_a_sample(frozen, options, chunk) for chunk in chunks)
    speeds = {worker: options.speed(worker) for worker in hosts_of(options, len(busy))}
    return idle_level(unfilled, busy, batch * rate, speeds)


def fill_costs(costs: Costs, plan: FillPlan) -> Costs:
    """The costs of the schedule that `insert_fills` makes with the plan's fills, from the unfilled schedule's costs."""
    return replace(
        costs,
        stages=costs.stages + (FREE,) * len(plan.fills),
        fills=plan.seconds,
        reduces=costs.reduces + (0.0,) * len(plan.fills) if costs.reduces else (),
    )

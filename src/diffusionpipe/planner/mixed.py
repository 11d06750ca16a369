"""The mean time of steps whose micro-batches have several sizes of samples.

A step that mixes sizes takes longer than one whose micro-batches all take the mean time, because stages wait for the
longer ones. So steps are drawn from the shares of the sizes, as runs draw them. Each micro-batch has the prices of its
own size. Rows lie size by size, the first size first: micro-batches that follow each other are about as long, and
stages wait less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from diffusionpipe.costs import Cluster, Costs, Profile
from diffusionpipe.holding.sizes import at_size
from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Plan, Range, Schedule
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.timing import Graph, graph_of
from diffusionpipe.timing.clock import timed
from diffusionpipe.timing.prices import host_times_of, price_of
from diffusionpipe.units import Seconds

DRAWN = 32
"""The number of steps that are drawn for a mean."""


def mean_step(profile: Profile, plan: Plan, run: int, cluster: Cluster | None = None, *, steps: int = DRAWN) -> Seconds:
    """The mean seconds of an iteration of a plan over `steps` steps whose sizes of samples are drawn by their shares.

    `run`: samples in a row that have one size. In each step the slowest copy of the pipeline counts. Without a cluster
    the plan runs on one machine with devices like the profiled one.
    """
    setting = setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed, cluster=cluster)
    prices = [
        costs_of(plan.train, plan.blocks, plan.mesh, replace(setting, profile=at_size(profile, number)))
        for number in range(len(profile.sizes))
    ]
    graph, count = graph_of(plan.train), plan.batch // plan.mesh.data_parallel
    shares = [size.share for size in profile.sizes]
    # A filled plan encodes the rows of the next step, so one more step is drawn.
    rows = list(drawn_rows(shares, run=run, batch=plan.batch, steps=steps + plan.is_filled))
    times = []
    for read, written in zip(rows, rows[1:] if plan.is_filled else rows, strict=False):
        firsts = range(0, plan.batch, count)
        # Rows lie size by size, as in a run.
        copies = [[sorted(own[first : first + count]) for own in (read, written)] for first in firsts]
        times.append(max(step_time(plan.train, prices, *own, graph=graph) for own in copies))
    return fmean(times)


def drawn_rows(shares: Sequence[float], *, run: int, batch: int, steps: int) -> Iterator[tuple[int, ...]]:
    """The number of the size of each sample of a batch, for each of `steps` steps, drawn by the shares of the sizes.

    The size furthest below its share comes next. `run`: samples in a row that have one size.

    >>> list(drawn_rows((0.75, 0.25), run=1, batch=4, steps=2))
    [(0, 0, 1, 0), (0, 0, 1, 0)]
    """
    counts, rows = [0] * len(shares), list[int]()
    for _ in range(steps):
        while len(rows) < batch:
            total = sum(counts) + 1
            number = max(range(len(shares)), key=lambda one: shares[one] * total - counts[one])
            counts[number] += 1
            rows += [number] * run
        yield tuple(rows[:batch])
        rows = rows[batch:]


def step_time(
    schedule: Schedule, prices: Sequence[Costs], read: Sequence[int], written: Sequence[int], *, graph: Graph
) -> Seconds:
    """The seconds of a step whose micro-batches have these sizes.

    Args:
        schedule: the schedule of the step, whose graph is `graph`.
        prices: the schedule's costs if all samples had one size, by the number of the size.
        read: the number of the size of each row that stages read.
        written: the number of the size of each row that is encoded; where a plan encodes ahead, rows of the next step.
        graph: the events of the schedule.
    """
    # Each event has a work of its own, so that two micro-batches of a stage may have two prices.
    works = [graph.works[work] for work in graph.work]
    own = replace(graph, work=tuple(range(len(works))), works=tuple(works))
    found = [price_of(work, prices[0]) for work in works]
    for order, events in zip(schedule.orders, graph.events, strict=True):
        for action, event in zip(order, events, strict=True):
            rows, is_frozen = _rows(schedule, action)
            if rows is not None and len(rows):
                held = (written if is_frozen else read)[rows.start : rows.stop]
                found[event] = fmean(price_of(works[event], prices[size]) for size in held)
    # Hosts issue the same kernels for every size.
    hosts = host_times_of(works, prices[0])
    return timed(own, found, waking=prices[0].waking, host_times=hosts).makespan


def _rows(schedule: Schedule, action: Action) -> tuple[Range | None, bool]:
    """(rows of the batch that an action works on or None, whether these are rows of frozen work)."""
    placement = schedule.placement
    if action.slot is not None and action.op is Op.ENCODE:
        return schedule.fills[action.slot].samples, True
    if action.slot is not None and action.op in MESSAGE_OPS:
        message = schedule.messages[action.slot]
        if placement.is_frozen(message.source):
            return message.samples, True
        return placement.pipeline_of(message.source).rows(message.microbatch), False
    if action.op in COMPUTE_OPS and action.microbatch is not None:
        return placement.rows(action.stage, action.microbatch), False
    return None, False

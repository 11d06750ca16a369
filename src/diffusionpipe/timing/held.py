"""The activations that a worker holds of its stages: the one rule, for bytes, micro-batches and anything else.

An activation is taken at the start of F. Tensors that no later op reads are given back at the end of I, the rest at the
end of the last op: W where the backward is split, else B, or F itself where there is no backward.

    op      F                    I                          B, W, or F without a backward
    held    + activation         - activation + kept        - the rest

The tensors kept for W are inputs of a stage's modules, which the activation holds too, and the gradients of their
outputs, which I makes. Where layers are recomputed it is far more than the activation, and I takes the difference at
its start.

A worker computes one action after the other, so the most that it holds depends on its order alone, not on times.

>>> {op.value: change for op, change in changes_of(frozenset({Op.F, Op.I, Op.W}), activation=5, kept=2).items()}
{'F': (5, 0), 'I': (0, -3), 'W': (0, -2)}
>>> {op.value: change for op, change in changes_of(frozenset({Op.F, Op.I, Op.W}), activation=2, kept=5).items()}
{'F': (2, 0), 'I': (3, 0), 'W': (0, -5)}
>>> from diffusionpipe.schedules import one_f_one_b
>>> activations_in_flight(one_f_one_b(3, 4))
(3, 2, 1)
"""

from collections.abc import Iterable, Sequence

from diffusionpipe.costs import Costs
from diffusionpipe.ir import MemorySample, Op, Schedule
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.timing.clock import Times
from diffusionpipe.units import Bytes, Seconds

Change = tuple[Bytes, Bytes]
"""(bytes that an action takes at its start, bytes that it takes at its end); negative numbers are given back."""


def changes_of(ops: frozenset[Op], activation: Bytes, kept: Bytes) -> dict[Op, Change]:
    """Op -> (bytes taken at its start, bytes taken at its end), in a pipeline with these ops; negative: given back.

    Args:
        ops: the ops of the pipeline.
        activation: the bytes that F takes.
        kept: the bytes that I leaves for W, where the backward is split.
    """
    if Op.B in ops:
        return {Op.F: (activation, 0), Op.B: (0, -activation)}
    if Op.W in ops:
        more = kept - activation
        return {Op.F: (activation, 0), Op.I: (max(more, 0), min(more, 0)), Op.W: (0, -kept)}
    return {Op.F: (activation, -activation)}


def peak_of(changes: Iterable[Change]) -> Bytes:
    """The most bytes that a worker holds at a time if its actions make these changes, one after the other."""
    held = peak = 0
    for start, end in changes:
        held += start  # faster than `max`
        if held > peak:
            peak = held
        held += end
    return peak


def changes_by_order(schedule: Schedule, sizes: Sequence[tuple[Bytes, Bytes]]) -> list[list[Change]]:
    """For each worker, the (start, end) changes in bytes by each of its actions, in their order.

    Args:
        schedule: its orders, and the ops of its pipelines.
        sizes: for each stage the activation of one micro-batch, and the bytes kept for W.
    """
    none = (0, 0)
    table = {
        (stage, op): change
        for pipeline in schedule.placement.pipelines
        for stage in pipeline.stages
        for op, change in changes_of(pipeline.ops, *sizes[stage]).items()
    }
    return [[table.get((action.stage, action.op), none) for action in order] for order in schedule.orders]


def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each worker, the most activations that it holds at a time: one for each micro-batch on each of its stages."""
    return tuple(map(peak_of, changes_by_order(schedule, [(1, 1)] * len(schedule.placement.stages))))


def most_in_waits(schedule: Schedule, sizes: Sequence[tuple[Bytes, Bytes]], times: Times) -> list[Bytes]:
    """The most bytes of activations that each worker holds while it waits for its next action, by worker.

    Args:
        schedule: its orders, and the ops of its pipelines.
        sizes: for each stage the activation of one micro-batch, and the bytes kept for W.
        times: of that schedule's graph, without messages in its orders.
    """
    found = []
    for events, changes in zip(times.graph.events, changes_by_order(schedule, sizes), strict=True):
        held, most, reached = 0, 0, 0.0
        for event, (taken, given_back) in zip(events, changes, strict=True):
            # Only the worker's own work: transfers beside it make no wait.
            if not times.graph.is_on_host[event]:
                continue
            if held > most and times.start(event) > reached:
                most = held
            held, reached = held + taken + given_back, times.ends[event]
        found.append(most)
    return found


def forwards_held(window: Schedule) -> tuple[int, ...]:
    """For each worker, the most forwards at a time whose backward is still to come, where the window repeats for ever.

    >>> from diffusionpipe.planner.assembly.windows import overlap
    >>> forwards_held(overlap(4, 2))
    (4, 3, 2, 1)
    """
    return activations_in_flight(unroll(window, window.lead + 2))


def memory_of(schedule: Schedule, costs: Costs, times: Times) -> tuple[MemorySample, ...]:
    """The bytes of activations of each worker at each moment at which they change, worker by worker, in order of time.

    At one moment, memory of actions that end is given back before memory of starting ones is taken: one sample.
    """
    samples = []
    sizes = [(stage.activation, stage.kept_after_input_grad) for stage in costs.stages]
    for worker, changes in enumerate(changes_by_order(schedule, sizes)):
        ends = times.ends
        sums: dict[Seconds, Bytes] = {}
        for event, (taken, given_back) in zip(times.graph.events[worker], changes, strict=True):
            if taken:
                start = times.start(event)
                sums[start] = sums.get(start, 0) + taken
            if given_back:
                sums[ends[event]] = sums.get(ends[event], 0) + given_back
        held = 0
        for time in sorted(sums):
            held += sums[time]
            samples.append(MemorySample(worker=worker, time=time, held=held))
    return tuple(samples)

"""What a worker holds of the activations of its stages: the one rule, for bytes, micro-batches and anything else.

An activation is taken at the start of F. What no later op reads is given back at the end of I, the rest at the end of
the last op: W where the backward is split, else B, or F itself where there is no backward.

    op      F                    I                          B, W, or F without a backward
    held    + activation         - activation + kept        - the rest

A worker computes one action after the other, so the most that it holds depends on its order alone, not on times.

>>> from diffusionpipe.schedules import one_f_one_b
>>> activations_in_flight(one_f_one_b(3, 4))
(3, 2, 1)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Action, MemorySample, Op, Schedule
from diffusionpipe.timing.clock import Times
from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True)
class Change:
    """What an action changes, as multiples of its stage's activation and of what of it is kept for W."""

    activation: int
    kept: int
    is_at_end: bool
    """Given back at the end of the action, instead of taken at its start."""


TAKEN = Change(1, 0, is_at_end=False)


def changes_of(ops: frozenset[Op]) -> dict[Op, Change]:
    """Op -> what it changes, in a pipeline with these ops. Without a backward F gives back what it takes.

    >>> [(op.value, change.activation, change.kept) for op, change in changes_of(frozenset({Op.F, Op.I, Op.W})).items()]
    [('I', -1, 1), ('W', 0, -1)]
    """
    if Op.B in ops:
        return {Op.B: Change(-1, 0, is_at_end=True)}
    if Op.W in ops:
        return {Op.I: Change(-1, 1, is_at_end=True), Op.W: Change(0, -1, is_at_end=True)}
    return {Op.F: Change(-1, 0, is_at_end=True)}


def amounts(schedule: Schedule, order: Sequence[Action]) -> Iterator[tuple[int, Action, Change]]:
    """All changes in an order, as they come: (position of the action, the action, what it changes)."""
    gives = {stage: changes_of(pipeline.ops) for pipeline in schedule.placement.pipelines for stage in pipeline.stages}
    for position, action in enumerate(order):
        if action.op is Op.F:
            yield position, action, TAKEN
        change = gives[action.stage].get(action.op)
        if change is not None:
            yield position, action, change


def peaks_of(schedule: Schedule, size_of: Callable[[int], tuple[Bytes, Bytes]]) -> tuple[Bytes, ...]:
    """The most that each worker holds.

    Args:
        schedule: its orders, and the ops of its pipelines.
        size_of: stage -> its activation of one micro-batch, and what of it is kept from the end of I to that of W.
    """
    sizes = [size_of(stage) for stage in range(len(schedule.placement.stages))]
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for _, action, change in amounts(schedule, order):
            activation, kept = sizes[action.stage]
            held += change.activation * activation + change.kept * kept
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each worker the most micro-batches, counted stage by stage, that it holds activations of at a time."""
    return peaks_of(schedule, lambda stage: (1, 1))


def memory_of(schedule: Schedule, costs: Costs, times: Times) -> tuple[MemorySample, ...]:
    """One sample at each moment at which what a worker holds changes.

    What ends at a moment is released before what starts then is held.
    """
    samples = []
    for worker, order in enumerate(schedule.orders):
        events = times.graph.events[worker]
        sums: dict[float, Bytes] = {}
        for position, action, change in amounts(schedule, order):
            event, cost = events[position], costs.stages[action.stage]
            time = times.ends[event] if change.is_at_end else times.start(event)
            amount = change.activation * cost.activation + change.kept * cost.kept_after_input_grad
            sums[time] = sums.get(time, 0) + amount
        held = 0
        for time in sorted(sums):
            held += sums[time]
            samples.append(MemorySample(worker=worker, time=time, held=held))
    return tuple(samples)

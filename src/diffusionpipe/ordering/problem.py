"""An instance with its placement decided, as flat tuples of integers.

The work of a rank is a sequence of *letters*: 3 s is the forward of stage s, 3 s + 1 its input gradient, 3 s + 2 its
weight gradient. The k-th time that a letter occurs in a sequence it is about micro-batch k. Micro-batches cost the
same, so nothing is lost by that: in whatever order they are taken, the k-th end of a letter comes no earlier than if
they were taken in turn. Held memory then depends on the sequence alone, and not on time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias

from diffusionpipe.ordering.instance import HalfStage, Instance, Number, Placing
from diffusionpipe.schedules.building.split_work import Goal, inputs_of

Letters: TypeAlias = tuple[tuple[int, ...], ...]
"""The sequences of letters of the ranks, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An instance with its placement decided, as flat tuples of whole numbers.

    Times are in units of 1 / `time_scale`, memory in units of 1 / `memory_scale`; so all numbers are exact.
    """

    placing: Placing
    num_ranks: int
    num_microbatches: int
    rank: tuple[int, ...]
    """The rank of each stage, by stage."""
    durations: tuple[int, ...]
    """The duration of each letter, by letter, in ticks of 1 / `time_scale`."""
    lags: tuple[int, ...]
    """The transfer time from the end of the action that a letter waits for to its own start, by letter, in ticks."""
    activation: tuple[int, ...]
    """The activation memory of one micro-batch, by stage, in units of 1 / `memory_scale`."""
    kept: tuple[int, ...]
    """The part of each stage's activation that is held on after the input gradient, by stage, in units of 1 /
    `memory_scale`."""
    limits: tuple[int, ...]
    """The memory of each rank, by rank, in units of 1 / `memory_scale`; at most the need of all micro-batches
    together."""
    is_window: bool
    """Whether the objective is the window; else it is the makespan."""
    time_scale: int
    memory_scale: int

    @property
    def num_stages(self) -> int:
        """The number of stages of the placement: one for each rank, or two."""
        return len(self.rank)

    @property
    def num_actions(self) -> int:
        """The number of actions of all ranks together: F, I and W of each stage and micro-batch."""
        return 3 * len(self.rank) * self.num_microbatches

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The letter that each letter waits for, by letter, or -1: its k-th action ends before the own k-th starts."""
        return inputs_of(len(self.rank))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in forward order."""
        return tuple(stage for stage, home in enumerate(self.rank) if home == rank)

    def needs(self, rank: int) -> int:
        """The least memory, in the problem's units, with which the rank can work: one micro-batch on all its stages."""
        return sum(self.activation[stage] for stage in self.stages_of(rank))

    def work(self, rank: int) -> int:
        """The time for which the rank computes, in ticks of 1 / `time_scale`."""
        return self.num_microbatches * sum(sum(self.durations[3 * s : 3 * s + 3]) for s in self.stages_of(rank))


def problem_of(instance: Instance, placing: Placing) -> Problem:
    """The problem of the instance with one of the three placements; its memory may be too small for any order."""
    stages, rank = placed_stages(instance, placing), home_of(placing, instance.ranks)
    times = [exact(t) for s in stages for t in (s.forward, s.input_grad, s.weight_grad)]
    comm = exact(instance.comm)
    time_scale = _denominator([*times, comm])
    memory = [exact(s.activation) for s in stages] + [exact(s.kept_after_input_grad) for s in stages]
    memory_scale = _denominator(memory)
    held = [int(amount * memory_scale) for amount in memory]
    activation, kept = tuple(held[: len(stages)]), tuple(held[len(stages) :])
    limits = [0] * instance.ranks
    for amount, worker in zip(activation, rank, strict=True):
        limits[worker] += instance.microbatches * amount
    if instance.memory_limit is not None:
        given = [int(exact(limit) * memory_scale) for limit in instance.memory_limit]
        limits = [min(pair) for pair in zip(limits, given, strict=True)]
    lags = [0] * (3 * len(stages))
    for stage in range(1, len(stages)):
        if rank[stage - 1] != rank[stage]:
            # F of this stage, and I of the one before, which reads its gradient.
            lags[3 * stage] = lags[3 * stage - 2] = int(comm * time_scale)
    return Problem(
        placing=placing,
        num_ranks=instance.ranks,
        num_microbatches=instance.microbatches,
        rank=rank,
        durations=tuple(int(time * time_scale) for time in times),
        lags=tuple(lags),
        activation=activation,
        kept=kept,
        limits=tuple(limits),
        is_window=instance.objective is Goal.WINDOW,
        time_scale=time_scale,
        memory_scale=memory_scale,
    )


def exact(number: Number) -> Fraction:
    """The fraction that the decimal digits of a number state: 0.1 is one tenth."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def number_of(value: int, scale: int) -> Number:
    """The value of `value` units of 1 / `scale`; an int where it is whole."""
    return value // scale if value % scale == 0 else value / scale


def home_of(placing: Placing, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, by stage, for one of the three placements."""
    ranks = tuple(range(num_ranks))
    match placing:
        case Placing.LINEAR:
            return ranks
        case Placing.V:
            return ranks + ranks[::-1]
        case _:
            return ranks + ranks


def placed_stages(instance: Instance, placing: Placing) -> list[HalfStage]:
    """The costs of the placement's stages: the half-stages, or for linear each two of them added up."""
    if placing is not Placing.LINEAR:
        return list(instance.stages)
    halves = iter(instance.stages)
    return [_merged(first, second) for first, second in zip(halves, halves, strict=True)]


def _merged(first: HalfStage, second: HalfStage) -> HalfStage:
    """The costs of two half-stages that run as one stage: their sums."""
    return HalfStage(
        forward=_sum(first.forward, second.forward),
        input_grad=_sum(first.input_grad, second.input_grad),
        weight_grad=_sum(first.weight_grad, second.weight_grad),
        activation=_sum(first.activation, second.activation),
        kept_after_input_grad=_sum(first.kept_after_input_grad, second.kept_after_input_grad),
    )


def _sum(first: Number, second: Number) -> Number:
    total = exact(first) + exact(second)
    return number_of(total.numerator, total.denominator)


def _denominator(values: Iterable[Fraction]) -> int:
    return lcm(*(value.denominator for value in values))

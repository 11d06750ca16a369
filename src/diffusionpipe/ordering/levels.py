"""Levels of memory: the limits of a problem, and smaller ones that are searched too."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from diffusionpipe.ordering.instance import Instance
from diffusionpipe.ordering.problem import Problem, exact

FEW_RANKS = 4
FEW_STEPS = 8
"""The most micro-batches of the small memory levels, 1, 2, ... up to it, of problems with at most `FEW_RANKS` ranks."""


def levels(instance: Instance, problem: Problem) -> list[Problem]:
    """The problem, then the same problem with less and less memory, down to room for one micro-batch.

    Two kinds of steps: limits in the same proportion, and on every rank room for the same number of micro-batches. The
    numbers follow from those of ranks and micro-batches alone. So of two instances the one with more memory has all
    levels of the other, if the other is on a step and

        both limits are in proportion, or
        the other has room for equally many micro-batches on every rank.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    needs = [problem.needs(rank) for rank in range(p)]
    given = [Fraction(m)] * p
    if instance.memory_limit is not None:
        scale = problem.memory_scale
        given = [
            exact(limit) * scale / need if need else Fraction(m)
            for limit, need in zip(instance.memory_limit, needs, strict=True)
        ]
    least = min(given)
    levels = {_quantized(problem, problem.limits): None}
    for step in sorted(_steps(p, m), reverse=True):
        if step <= least:
            # In the same proportion as the given limits, with room for `step` micro-batches on the poorest rank.
            limits = [min(int(step * part / least * need), m * need) for part, need in zip(given, needs, strict=True)]
            levels[_quantized(problem, limits)] = None
            levels[_quantized(problem, [step * need for need in needs])] = None  # room for `step` on every rank
    return [replace(problem, limits=limits) for limits in levels]


def _steps(num_ranks: int, num_microbatches: int) -> set[int]:
    """The numbers of micro-batches for which levels have room; with few ranks they include 1 to `FEW_STEPS`."""
    p, m = num_ranks, num_microbatches
    steps = range(1, FEW_STEPS + 1) if p <= FEW_RANKS else (1, -(-p // 2), p)
    return {step for step in (*steps, 2 * p, m) if step <= m}


def _quantized(problem: Problem, limits: Sequence[int]) -> tuple[int, ...]:
    """The limits, by rank, each rounded down to a multiple of the unit of all amounts that the rank can hold."""
    found = []
    for rank, limit in enumerate(limits):
        amounts = [amount for s in problem.stages_of(rank) for amount in (problem.activation[s], problem.kept[s])]
        # All that is held is a multiple of the unit. Limits that admit the same orders become one level.
        unit = gcd(*amounts)
        found.append(limit // unit * unit if unit else limit)
    return tuple(found)

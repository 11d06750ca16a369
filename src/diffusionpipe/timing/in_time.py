"""Denoising steps in blocks that are computed at the same time: which evaluation of the denoiser runs when.

Source: Selvam, Merchant, Ermon, "Self-Refining Diffusion Samplers" (SRDS), NeurIPS 2024,
https://arxiv.org/abs/2412.08292: Parareal over the time steps of a drawing. N steps are cut into B blocks of at most m
steps, B about sqrt(N). First one coarse step crosses each block; then blocks refine their results together:

    block 0   F F F | F F F |            F  an evaluation, a tick each; the first of a refinement is the coarse step's,
    block 1     F F F | F F F |             because both read the same sample at the same time
    block 2       F F F | F F F
              ticks ->                   B = 3, m = 3: a first result after 3 ticks, refined ones after 6, 9, ...

A result with k refinements is there after B + k m ticks: a refinement follows the one before it without waiting. With a
sweep of coarse steps alone between refinements it would be B + k (m + B). After k refinements the first k blocks are
exact, so they are not evaluated again, and B refinements give the sequential result.

>>> evaluations(3, 3, 0), evaluations(3, 3, 1)
([[0], [0, 1], [0, 1, 2]], [[0], [0, 1], [0, 1, 2], [1, 2], [1, 2], [1, 2]])
>>> latency(3, 3, 1, ranks=3), latency(3, 3, 1, ranks=1), 3 + 1 * 3
(6, 12, 6)
"""

from itertools import pairwise
from math import isqrt

from diffusionpipe.ir import Range

USUAL_REFINEMENTS = 2
"""The number of refinements that plans assume for a drawing."""


def blocks_of(steps: int) -> tuple[Range, ...]:
    """The ranges of denoising steps that are refined together: ceil(sqrt(steps)) blocks, the larger ones first.

    >>> [len(block) for block in blocks_of(20)], [len(block) for block in blocks_of(11)]
    ([4, 4, 4, 4, 4], [3, 3, 3, 2])
    """
    count = isqrt(steps - 1) + 1  # the square root, rounded up
    size, more = divmod(steps, count)
    starts = [number * size + min(number, more) for number in range(count + 1)]
    return tuple(Range(start, stop) for start, stop in pairwise(starts))


def place_of(tick: int, block: int, period: int) -> tuple[int, int]:
    """(refinement, step within the block) that block number `block` computes in a tick; refinement < 0: not yet begun.

    `period` is the number of steps of a block.
    """
    return divmod(tick - block, period)


def is_evaluated(refinement: int, block: int) -> bool:
    """Whether the denoiser is evaluated for a block in this refinement; block k is exact after k + 1 refinements."""
    return block >= refinement


def evaluations(blocks: int, period: int, refinements: int) -> list[list[int]]:
    """For each tick, the numbers of the blocks that are evaluated, up to the result with this number of refinements.

    All blocks are of `period` steps.
    """
    found = []
    for tick in range(blocks + refinements * period):
        places = {block: place_of(tick, block, period)[0] for block in range(blocks)}
        found.append([block for block, at in places.items() if at >= 0 and is_evaluated(at, block)])
    return found


def latency(blocks: int, period: int, refinements: int, *, ranks: int) -> int:
    """The number of evaluations, one after another, that the busiest ranks make until the result is there.

    Block b is on rank b % `ranks`; `period` is the number of steps of a block.
    """
    return sum(
        max(sum(block % ranks == rank for block in tick) for rank in range(ranks))
        for tick in evaluations(blocks, period, refinements)
    )

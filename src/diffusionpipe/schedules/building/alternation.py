"""Forwards and backwards in turn after a warm-up, and the rounds in which chunks take turns.

1F1B, DAPPLE, kFkB, interleaved 1F1B and its zero-bubble form differ in the length of the warm-up, in what is one turn,
and in the sequence of (chunk, micro-batch). The rest is here.
"""

from collections.abc import Sequence
from itertools import accumulate

from diffusionpipe.ir import Action


def alternate(
    forwards: Sequence[Sequence[Action]], backwards: Sequence[Sequence[Action]], *, warm_up: int
) -> list[Action]:
    """One worker's order: `warm_up` forwards, a forward and a backward in turn, then the backwards that are left.

    A turn is one element of `forwards` or `backwards`: one action or several. There are as many of either.

    >>> from diffusionpipe.schedules.building.shapes import backwards, forwards
    >>> turns = [forwards(0, i, i + 1) for i in range(4)], [backwards(0, i, i + 1) for i in range(4)]
    >>> print(*alternate(*turns, warm_up=2))
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    """
    num_steady = len(forwards) - warm_up
    turns = list(forwards[:warm_up])
    # As many turns as there are forwards after the warm-up.
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        turns += [forward, backward]
    turns += backwards[num_steady:]
    return [action for turn in turns for action in turn]


def rounds(num_microbatches: int, shortest: int) -> tuple[range, ...]:
    """The micro-batches 0, 1, ... in as many rounds of at least `shortest` as there can be, the longer ones first.

    Lengths differ by at most one. Fewer micro-batches than `shortest` are one round.

    >>> rounds(11, 4)
    (range(0, 6), range(6, 11))
    >>> rounds(3, 4)
    (range(0, 3),)
    """
    num_rounds = max(1, num_microbatches // shortest)
    length, num_longer = divmod(num_microbatches, num_rounds)
    stops = list(accumulate(length + (i < num_longer) for i in range(num_rounds)))
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def depth_first(in_rounds: Sequence[range], chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of a worker that takes a round through all its chunks before the next round.

    >>> depth_first(rounds(4, 2), 2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    return [(chunk, microbatch) for one in in_rounds for chunk in range(chunks) for microbatch in one]

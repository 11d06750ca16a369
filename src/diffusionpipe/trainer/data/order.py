"""The order of the data, which is endless: epoch after epoch, also where new samples enter in between.

    position   0                     20                    40                              65
    epoch      0: 20 samples         1: 20 samples         2: 25 samples                   3 ...
    growth                       ((30, 5),): five more are known from position 30 on

Step k takes positions k * batch up to (k + 1) * batch. An epoch holds the samples that are known at its start, so the
order of a running epoch never changes.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

Growth = tuple[tuple[int, int], ...]
"""The growth of a dataset: (position from which on further samples enter, their number), sorted by position. Later
samples have higher indices."""


class OrderPlace(NamedTuple):
    """A position in the endless order of the data, by its epoch."""

    epoch: int
    """The number of the epoch, from 0."""
    number: int
    """The number of the position within its epoch, from 0."""
    size: int
    """The number of samples in the epoch."""


def place_of(position: int, num_samples: int, growth: Growth = ()) -> OrderPlace:
    """The epoch of a position in the endless order, the position's number in it, and the epoch's number of samples.

    `num_samples`: the number of all samples, the growth included.

    >>> [place_of(position, 25, ((30, 5),)) for position in (19, 39, 40, 65)]
    [OrderPlace(epoch=0, number=19, size=20), OrderPlace(epoch=1, number=19, size=20), \
OrderPlace(epoch=2, number=0, size=25), OrderPlace(epoch=3, number=0, size=25)]
    """
    start, epoch = 0, 0
    size = num_samples - sum(count for _, count in growth)
    for since, count in growth:
        # Epochs of this size that have begun before the growth; it enters with the next one.
        whole = max(0, -(-(since - start) // size))
        if position < start + whole * size:
            break
        start, epoch, size = start + whole * size, epoch + whole, size + count
    whole, number = divmod(position - start, size)
    return OrderPlace(epoch + whole, number, size)


def next_epoch(position: int, num_samples: int, growth: Growth = ()) -> int:
    """The first position, from this one on, at which an epoch begins.

    `num_samples`: the number of all samples, the growth included.
    """
    place = place_of(position, num_samples, growth)
    return position if place.number == 0 else position + place.size - place.number


def num_epochs(positions: int, num_samples: int, growth: Growth = ()) -> float:
    """The number of epochs, with a fraction for the last one, in the first `positions` positions of the endless order.

    `num_samples`: the number of all samples, the growth included.
    """
    place = place_of(positions, num_samples, growth)
    return place.epoch + place.number / place.size


def num_positions(epochs: float, num_samples: int, growth: Growth = ()) -> int:
    """The number of positions in the endless order that make this number of epochs, rounded up.

    It is the inverse of `num_epochs`. `num_samples`: the number of all samples, the growth included.

    >>> [num_positions(epochs, 25, ((30, 5),)) for epochs in (0.5, 2, 3, 3.1)]
    [10, 40, 65, 68]
    """
    start, before = 0, 0
    size = num_samples - sum(count for _, count in growth)
    for since, count in growth:
        whole = max(0, -(-(since - start) // size))
        if epochs < before + whole:
            break
        start, before, size = start + whole * size, before + whole, size + count
    return start + ceil(round((epochs - before) * size, 6))  # 0.1 x 30 is not 4


def growth_of(counts: Sequence[tuple[int, int]]) -> Growth:
    """The growth of a dataset from pairs of (position, number of samples that enter there), in any order.

    Pairs are sorted, and their numbers summed by position. Pairs with position 0 are left out.
    """
    positions = sorted({since for since, count in counts if since > 0 and count})
    return tuple((since, sum(count for one, count in counts if one == since)) for since in positions)

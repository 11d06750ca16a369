"""The order of pictures of several sizes, which is endless and drops nothing.

Positions of the data come in runs of one size. A size has a stream of its own: its pictures in another random order
in each epoch, one epoch after the other, cut into runs. Run i of a size is due when the epoch has come as far as its
stream:

    size A, 6 pictures    |  run 0    run 1    run 2  |  run 3 ...           runs of 2
    size B, 4 pictures    |     run 0       run 1     |     run 2 ...
    sequence                 A    B    A    B    A       A    B ...

So the size that lacks most of its share is next, and the counts stay within one run of the shares. The place of a
size's first run is keyed by the seed. The sequence depends on seed, pictures and the length of runs alone, and any run
can be found without those before it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.randomness import generator
from diffusionpipe.trainer.data.sizes.sizes import Assignment, SizeShare

_PHASES = 2**20


def keyed_as(size: Clip) -> str:
    """The text "FRAMESxHEIGHTxWIDTH" of a size, which is a part of the key of its random numbers."""
    return f"{size.frames}x{size.height}x{size.width}"


class SizedPlace(NamedTuple):
    """The sample at a position of the endless order, with its size."""

    size: int
    """The index of its size in the order's `sizes`."""
    sample: int
    """The index of the sample in the dataset."""
    epoch: int
    """The number of times that the sample was seen before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOrder:
    """The endless order of samples of several sizes, in runs of `run` samples of one size."""

    assignment: Assignment
    """The sizes at which each picture is trained."""
    seed: int
    """The seed of the order."""
    run: int
    """The number of positions in a row that have one size; micro-batches lie within them."""

    @property
    def sizes(self) -> tuple[Clip, ...]:
        """The sizes that have samples; `size_numbers` and `at` give indices into this tuple."""
        return tuple(share.size for share in self.assignment.shares)

    def at(self, position: int) -> "SizedPlace":
        """The sample at a position of the endless order, its size's index, and how often it was seen before."""
        number, place = divmod(position, self.run)
        size, own = _run_at(self, number)
        return SizedPlace(size, *self._sample(self.assignment.shares[size], own * self.run + place))

    def size_numbers(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The index in `sizes` of the size at each of these positions of the endless order."""
        return tuple(_run_at(self, position // self.run)[0] for position in positions)

    def _sample(self, share: SizeShare, position: int) -> tuple[int, int]:
        """The sample at a position of a size's stream, and the number of the epoch in which it is seen."""
        # A cycle of epochs, in each of which other pictures may have this size.
        cycle, rest = divmod(position, share.visits)
        ends = list(accumulate(map(len, share.members)))
        epoch = bisect_right(ends, rest)
        members = share.members[epoch]
        number = cycle * self.assignment.cycle + epoch
        order = _shuffled(self.seed, keyed_as(share.size), number, len(members))
        return members[int(order[rest - (ends[epoch] - len(members))])], number

    def _first_run(self, share: SizeShare, epoch: int) -> int:
        """The number of runs of a size that are due before epoch `epoch` begins."""
        seen = self._seen_before(share, epoch)
        # Run i is due at position (i + phase) * run of the stream, with a phase in [0, 1) in parts of `_PHASES`: the
        # least i whose position is not before `seen`, in whole numbers.
        return max(0, -(-(seen * _PHASES - self._phase(share) * self.run) // (self.run * _PHASES)))

    def _seen_before(self, share: SizeShare, epoch: int) -> int:
        """The number of positions in a size's stream that lie before epoch `epoch`."""
        cycle, rest = divmod(epoch, self.assignment.cycle)
        return cycle * share.visits + sum(map(len, share.members[:rest]))

    def _phase(self, share: SizeShare) -> int:
        return _phase_of(self.seed, keyed_as(share.size))


@lru_cache(maxsize=256)
def _phase_of(seed: int, size: str) -> int:
    return int(generator(seed=seed, purpose=f"phase.{size}", step=0, position=0).integers(_PHASES))


@lru_cache(maxsize=256)
def _shuffled(seed: int, size: str, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of a size's pictures in an epoch: a random permutation of 0 to `count` - 1."""
    order = generator(seed=seed, purpose=f"order.{size}", step=epoch, position=0).permutation(count)
    return order.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The runs that are due in one epoch, in their order."""

    first: int
    """The number of its first run, counted over all sizes and epochs."""
    sizes: NDArray[np.int64]
    """The index of each run's size."""
    own: NDArray[np.int64]
    """The number of each run among the runs of its size."""


_EPOCHS: int = 4
"""The number of epochs whose runs are kept in memory; steps go from one epoch to the next."""


def _run_at(order: SizeOrder, number: int) -> tuple[int, int]:
    """The index of a run's size, and the run's number among the runs of that size.

    `number`: the run's number among all runs.
    """
    visits = order.assignment.visits
    # An estimate: phases move runs over the ends of epochs.
    epoch = max(0, number * order.run * order.assignment.cycle // visits - 1)
    found = _epoch_of(_Key(order), epoch)
    while number < found.first:
        epoch -= 1
        found = _epoch_of(_Key(order), epoch)
    while number >= found.first + len(found.sizes):
        epoch += 1
        found = _epoch_of(_Key(order), epoch)
    place = number - found.first
    return int(found.sizes[place]), int(found.own[place])


class _Key:
    """An order as a key of a cache, compared by the identity of its assignment.

    Hashing a million pictures would take longer than making the runs.
    """

    __slots__ = ("order",)

    def __init__(self, order: SizeOrder) -> None:
        self.order = order

    def __hash__(self) -> int:
        return hash((id(self.order.assignment), self.order.seed, self.order.run))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (
            self.order.assignment is other.order.assignment
            and (self.order.seed, self.order.run) == (other.order.seed, other.order.run)
        )


@lru_cache(maxsize=_EPOCHS)
def _epoch_of(key: _Key, epoch: int) -> _Epoch:
    """The runs of all sizes that are due in an epoch, in their order."""
    order = key.order
    dues, sizes, owns, first = [], [], [], 0
    for number, share in enumerate(order.assignment.shares):
        start, stop = order._first_run(share, epoch), order._first_run(share, epoch + 1)
        first += start
        seen, members = order._seen_before(share, epoch), share.members[epoch % order.assignment.cycle]
        own = np.arange(start, stop, dtype=np.int64)
        # Of each run in the size's stream, from the start of the epoch.
        positions = own * order.run + order._phase(share) * order.run / _PHASES - seen
        dues.append(positions / max(1, len(members)))
        sizes.append(np.full(len(own), number, dtype=np.int64))
        owns.append(own)
    due, size, own = np.concatenate(dues), np.concatenate(sizes), np.concatenate(owns)
    sequence = np.lexsort((size, due))  # by `due`; equal ones by size
    return _Epoch(first, size[sequence], own[sequence])

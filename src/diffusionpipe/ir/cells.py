"""Micro-batches whose samples have several sizes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diffusionpipe.ir.schedule import Schedule


class Cell(NamedTuple):
    """A micro-batch of samples of one size: the number of the size, and the number of samples."""

    size: int
    """The number of the size."""
    samples: int


Cutting = Callable[[tuple[int, ...]], Schedule]
"""The training schedule of a step, from the number of samples of each size in a pipeline's batch.

Its micro-batches are numbered size by size, as `rows_by_size` arranges samples; its actions may come in another order.
"""


def rows_by_size(sizes: Sequence[int]) -> tuple[int, ...]:
    """The row numbers in an order in which samples of one size lie side by side; `sizes` has the size of each row.

    Smaller size numbers come first. Rows of equal size keep their order.

    >>> rows_by_size((0, 1, 0))
    (0, 2, 1)
    """
    return tuple(sorted(range(len(sizes)), key=sizes.__getitem__))

"""Micro-batches whose samples have several sizes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diffusionpipe.ir.schedule import Schedule


class Cell(NamedTuple):
    """A micro-batch of samples of one size: the number of the size, and the number of samples."""

    size: int
    """The number of the size, counted from 0."""
    samples: int


Cutting = Callable[[tuple[int, ...]], Schedule]
"""A function from the number of samples of each size in a pipeline's batch to the training schedule of the step.

Micro-batches are numbered size by size, as `rows_by_size` arranges samples; actions may come in another order.
"""


def rows_by_size(sizes: Sequence[int]) -> tuple[int, ...]:
    """The row numbers in an order that puts samples of one size side by side; `sizes` has the size number of each row.

    Smaller size numbers come first. Rows of equal size keep their order.

    >>> rows_by_size((0, 1, 0))
    (0, 2, 1)
    """
    return tuple(sorted(range(len(sizes)), key=sizes.__getitem__))

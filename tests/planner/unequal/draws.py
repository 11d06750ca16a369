"""Steps drawn from a stated histogram of sizes, and prices of them."""

import random
from collections.abc import Iterator

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir.cells import Cell
from diffusionpipe.planner.unequal.steps import Prices

CLASSES = {4096: 1, 2304: 2, 1024: 3}
"""Tokens of pictures of 1024, 768 and 512 pixels, and how many of each in six pictures."""


def drawn_counts(steps: int, seed: int, batch: int = 32) -> Iterator[list[int]]:
    """The number of samples of each size, step after step."""
    draw = random.Random(seed)
    for _ in range(steps):
        sizes = draw.choices(range(len(CLASSES)), tuple(CLASSES.values()), k=batch)
        yield [sizes.count(size) for size in range(len(CLASSES))]


def priced(stages: int, *, call: float = 500, side_by_side: int = 1) -> Prices:
    """Times in proportion to tokens, with a time for each call; room for `side_by_side` of the largest samples."""
    tokens = tuple(CLASSES)

    def costs(cell: Cell) -> tuple[StageCosts, ...]:
        work = tokens[cell.size] * cell.samples
        return (StageCosts(forward=call + work, backward=2 * (call + work), activation=work),) * stages

    limits = tuple((stages - stage) * side_by_side * max(tokens) for stage in range(stages))
    return Prices(stages=costs, num_stages=stages, limits=limits)

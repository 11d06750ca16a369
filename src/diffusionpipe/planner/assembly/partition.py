"""Cuts a chain of layers into stages."""

from collections.abc import Sequence
from itertools import accumulate

from diffusionpipe.errors import ConfigError


def balanced_cuts(costs: Sequence[float], num_blocks: int, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """The index of the first layer of each of `num_blocks` contiguous blocks whose largest cost is least.

    `costs`: the cost of each layer.

    `speeds`: the divisor of each block's cost; () for 1. Every block gets at least one layer. Dynamic program over
    (layers, blocks), O(layers² x blocks); among equally good cuts the one with the cheapest later blocks wins, so the
    result is unique.

    >>> balanced_cuts([1, 1, 1, 3], 2), balanced_cuts([1, 1, 1, 3], 2, speeds=(0.5, 1))
    ((0, 3), (0, 2))

    Raises:
        ConfigError: there are more blocks than layers.
    """
    num_layers = len(costs)
    if not 1 <= num_blocks <= num_layers:
        raise ConfigError(
            f"{num_blocks} stages cannot be cut from {num_layers} layers; use between 1 and {num_layers} stages"
        )
    total = [0.0, *accumulate(costs)]
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_blocks + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_blocks + 1)]
    best[0][0] = 0.0
    for blocks, speed in enumerate(speeds or (1,) * num_blocks, start=1):
        for stop in range(blocks, num_layers + 1):
            for start in range(blocks - 1, stop):
                dearest = max(best[blocks - 1][start], (total[stop] - total[start]) / speed)
                # "<=": of equal cuts the last one, with the most layers in the earlier blocks.
                if dearest <= best[blocks][stop]:
                    best[blocks][stop], cut[blocks][stop] = dearest, start
    starts: list[int] = []
    stop = num_layers
    for blocks in range(num_blocks, 0, -1):
        stop = cut[blocks][stop]
        starts.append(stop)
    return tuple(reversed(starts))

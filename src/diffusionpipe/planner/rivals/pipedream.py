"""PipeDream's partition of a chain of layers, as its released optimizer computes it.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1, with the
optimizer's own terms where they differ from the paper's: on the lowest level compute and gradient sums are added, not
overlapped; the gradient term is divided by the replicas twice; all machines are used.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from diffusionpipe.units import Bytes, Seconds


def pipedream(
    times: Sequence[Seconds],
    outputs: Sequence[Bytes],
    parameters: Sequence[Bytes],
    levels: Sequence[tuple[int, float]],
) -> tuple[Seconds, tuple[tuple[int, int], ...]]:
    """(seconds for each minibatch, stages as (first layer, devices that replicate it)), by PipeDream's optimizer.

    Args:
        times: forward and backward of each layer for one minibatch.
        outputs: bytes of each layer's output for one minibatch.
        parameters: bytes of each layer's parameters.
        levels: (units, bytes per second between them) from the innermost level out, e.g. 4 devices a machine and 2
            machines.

    With T(i, j) the seconds of layers i..j on one unit, P their parameter bytes, O(j) the bytes that leave layer j:

        A(i, j, 1)  = T(i, j)
        A(i, j, m)  = min of  (T(i, j) + 4 (m - 1) P(i, j) / (bandwidth m inner)) / m
                              max(A(i, k, m - m'), (T(k+1, j) + 4 (m' - 1) P(k+1, j) / (bandwidth m')) / m',
                                  2 O(k) / (bandwidth m'), 2 O(j) / (bandwidth m') if j is not last)

    On a higher level T is the level below with all its units, and `inner` is their number (1 at the bottom). O(layers³
    x units²) a level; the last one computes only what begins at the first layer.
    """
    num_layers = len(times)
    sums = [0.0, *accumulate(times)]
    weights = [0, *accumulate(parameters)]
    lower = [[sums[j + 1] - sums[i] for j in range(num_layers)] for i in range(num_layers)]
    inner = 1
    solved: list[tuple[int, list[_Table]]] = []
    for number, (units, bandwidth) in enumerate(levels):
        level = _Level(lower, weights, outputs, units=units, bandwidth=bandwidth, inner=inner)
        tables = [level.solve(first) for first in range(1 if number == len(levels) - 1 else num_layers)]
        solved.append((units, tables))
        lower = [[row[units][0] for row in table] for table in tables]
        inner = units
    return lower[0][-1], tuple(_stages(solved, 0, num_layers - 1))


_Cell = tuple[Seconds, int, int]
"""(seconds a minibatch of the best partition of a chain of layers, first layer of its last stage, units of it)."""
_Table = list[list[_Cell]]
"""[last layer][units] -> the cell of a chain of layers; chains that end before they begin take infinitely long."""


class _Level:
    """One level of the hierarchy of units, such as the devices of a machine, with the best partitions on it."""

    def __init__(
        self,
        lower: Sequence[Sequence[Seconds]],
        weights: Sequence[Bytes],
        outputs: Sequence[Bytes],
        *,
        units: int,
        bandwidth: float,
        inner: int,
    ) -> None:
        self.lower, self.weights, self.outputs = lower, weights, outputs
        self.units, self.bandwidth, self.inner = units, bandwidth, inner

    def solve(self, first: int) -> _Table:
        """The best partitions of all chains that begin at layer `first`, by last layer and number of units."""
        table: _Table = []
        for last in range(len(self.outputs)):
            row: list[_Cell] = [(float("inf"), first, 0)]
            for units in range(1, self.units + 1):
                row.append(self._cell(table, first, last, units) if last >= first else row[0])
            table.append(row)
        return table

    def _cell(self, table: Sequence[Sequence[_Cell]], first: int, last: int, units: int) -> _Cell:
        best = (self._stage(first, last, units, self.inner), first, units)
        is_last = last == len(self.outputs) - 1
        for cut in range(first, last):
            for count in range(1, units):
                sent = max(self.outputs[cut], 0 if is_last else self.outputs[last])
                slowest = max(
                    table[cut][units - count][0],
                    self._stage(cut + 1, last, count, 1),
                    2 * sent / (self.bandwidth * count),
                )
                if slowest < best[0]:
                    best = slowest, cut + 1, count
        return best

    def _stage(self, first: int, last: int, units: int, inner: int) -> Seconds:
        num_bytes = self.weights[last + 1] - self.weights[first]
        summed = 4 * (units - 1) * num_bytes / (self.bandwidth * units * inner)
        return (self.lower[first][last] + summed) / units


def _stages(solved: Sequence[tuple[int, list[_Table]]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """(first layer, devices) of each stage of layers first..last on all units of the top level.

    A stage of a level may be several stages on the levels below. `solved`: (units, tables by first layer) of each
    level, innermost first.
    """
    if not solved:
        yield first, 1
        return
    (*below, (units, tables)) = solved
    # From the last stage back: each cell says where its last stage begins.
    stages = []
    while units:
        _, start, count = tables[first][last][units]
        stages.append((start, last, count))
        last, units = start - 1, units - count
    for start, stop, count in reversed(stages):
        yield from ((layer, count * replicas) for layer, replicas in _stages(below, start, stop))

"""Batch sizes measured one after the other, and all of them again, while they are not steady.

    sweep 1    1  2  4  8  16      a machine's speed changes within seconds: at first the sizes from 4 on are slower
    sweep 2    1  2  4  8  16      all again
    sweep 3          4  8  16      those whose times have changed by more than `STEADY`

So what is slow for some seconds makes no size look slower than the others for good. Each time is the median of the
sweeps; its spread is at least half the distance between them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from diffusionpipe.costs import HostTimes
from diffusionpipe.profiler.passes import Agree, LayerTimes
from diffusionpipe.units import Bytes, Seconds

MOST_SWEEPS = 4
STEADY = 0.03
"""Times that differ by less than this part from those of the sweep before are steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeColumn:
    """The measured times and bytes of all layers at one batch size, by layer."""

    times: Mapping[str, LayerTimes]
    activation: Mapping[str, Bytes]
    workspace: Mapping[str, Bytes]
    drawing: Mapping[str, Bytes]
    kept: Mapping[str, Bytes]
    kept_reads: Mapping[str, tuple[str, ...]]
    copies: Mapping[str, Bytes]
    waking: tuple[tuple[Seconds, Seconds], ...]
    """(wait, extra time of forwards after it); () where it was not measured."""
    took: Seconds
    """The time that it took to measure the column, in seconds."""

    @property
    def seconds(self) -> Seconds:
        """The seconds of forward and backward of all layers together."""
        return sum(one.forward + one.input_grad + one.weight_grad for one in self.times.values())


def sweep(
    first: Mapping[int, SizeColumn],
    again: Callable[[int], SizeColumn],
    agree: Agree,
    end: Seconds,
    most: int = MOST_SWEEPS,
) -> dict[int, SizeColumn]:
    """Batch size -> its column, the median of a first sweep and of further ones while times still change.

    `again` measures a size once more; no sweep begins that would not be over before `end`, on the clock of
    `time.perf_counter`, and none after `most` of them. `agree` keeps ranks in step.
    """
    found = {size: [column] for size, column in first.items()}
    for number in range(1, most):
        due = [size for size, columns in found.items() if number == 1 or agree(_change(columns)) > STEADY]
        expected = sum(columns[0].took for size, columns in found.items() if size in due)
        if not due or agree(time.perf_counter() + expected - end) > 0:
            break
        for size in due:
            found[size].append(again(size))
    return {size: joined(columns) for size, columns in found.items()}


def _change(columns: Sequence[SizeColumn]) -> float:
    """The relative change of the time of all layers from the last sweep but one to the last one; 0.1 is a tenth."""
    before, last = columns[-2].seconds, columns[-1].seconds
    return abs(last / before - 1.0) if before else 0.0


def joined(columns: Sequence[SizeColumn]) -> SizeColumn:
    """The column of the medians of the times of several columns of one batch size; bytes are the first one's."""
    waking = [column.waking for column in columns if column.waking]
    # All columns have the same waits.
    table = tuple((same[0][0], median(extra for _, extra in same)) for same in zip(*waking, strict=True))
    return SizeColumn(
        times={name: _joined([column.times[name] for column in columns]) for name in columns[0].times},
        activation=columns[0].activation,
        workspace=columns[0].workspace,
        drawing=columns[0].drawing,
        kept=columns[0].kept,
        kept_reads=columns[0].kept_reads,
        copies=columns[0].copies,
        waking=table,
        took=sum(column.took for column in columns),
    )


def _joined(times: Sequence[LayerTimes]) -> LayerTimes:
    def of(values: Sequence[Seconds]) -> Seconds:
        return median(values)

    forwards = [one.forward for one in times]
    probes = [one.forward_only for one in times if one.forward_only is not None]
    backwards = [one.input_grad + one.weight_grad for one in times]
    return LayerTimes(
        forward=of(forwards),
        forward_spread=max(of([one.forward_spread for one in times]), _half(forwards)),
        backward_spread=max(of([one.backward_spread for one in times]), _half(backwards)),
        input_grad=of([one.input_grad for one in times]),
        weight_grad=of([one.weight_grad for one in times]),
        forward_only=of(probes) if probes else None,
        cast=of([one.cast for one in times]),
        host=HostTimes(
            forward=of([one.host.forward for one in times]),
            input_grad=of([one.host.input_grad for one in times]),
            weight_grad=of([one.host.weight_grad for one in times]),
        ),
    )


def _half(values: Sequence[Seconds]) -> Seconds:
    return (max(values) - min(values)) / 2

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
"""The relative change of a size's time between two sweeps up to which the size is steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeColumn:
    """The measured times and bytes of all layers at one batch size, by layer."""

    times: Mapping[str, LayerTimes]
    """The times of each layer; the meaning of the bytes below is in `LayerProfile`."""
    activation: Mapping[str, Bytes]
    """Bytes that each layer keeps for its backward."""
    workspace: Mapping[str, Bytes]
    """Temporary bytes of each layer while it runs."""
    drawing: Mapping[str, Bytes]
    """Bytes of each layer's forward at its peak if nothing is kept for a backward."""
    kept: Mapping[str, Bytes]
    """Bytes that each layer keeps from its I to its W."""
    kept_reads: Mapping[str, tuple[str, ...]]
    """Names of the tensors that each layer reads and that stay for its W."""
    copies: Mapping[str, Bytes]
    """Bytes of the copies of each layer's weights."""
    waking: tuple[tuple[Seconds, Seconds], ...]
    """(time of a wait, extra time of forwards after it) for each wait; () if it was not measured."""
    took: Seconds
    """The time that measuring this batch size took."""

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
    """Batch size -> its times and bytes: medians of a first sweep and of further ones, while times still change.

    Args:
        first: the results of the first sweep, by batch size.
        again: measures a batch size once more.
        agree: keeps ranks that measure at the same time in step.
        end: the time before which a further sweep must be over, or it does not begin; by `time.perf_counter`.
        most: the most sweeps, the first one included.
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
    """The relative change of the time of all layers between the last two sweeps; 0.1 is a tenth."""
    before, last = columns[-2].seconds, columns[-1].seconds
    return abs(last / before - 1.0) if before else 0.0


def joined(columns: Sequence[SizeColumn]) -> SizeColumn:
    """One column of several ones of the same batch size, with the medians of their times and the first one's bytes."""
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

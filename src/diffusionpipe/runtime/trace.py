"""When every action of an iteration ran, at next to no cost."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Protocol

import torch

from diffusionpipe.ir import Action, Span


class Recorder(Protocol):
    """Marks points in time of the stream that computes."""

    @property
    def mark(self) -> Callable[[], None]:
        """Notes the time."""
        ...

    def reset(self) -> None:
        """Forget all marks; the next one is time 0."""
        ...

    def times(self) -> list[float]:
        """Seconds since the first mark. On GPUs it waits for the device."""
        ...

    def passed(self) -> int:
        """The marks that the stream has passed. It never waits, and any thread may call it."""
        ...


class HostRecorder:
    """The host's clock: right where compute blocks the host."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        append = self._marks.append

        def mark() -> None:
            append(perf_counter_ns())

        self.mark = mark

    def reset(self) -> None:
        """See `Recorder`."""
        self._marks.clear()

    def times(self) -> list[float]:
        """See `Recorder`."""
        return [(mark - self._marks[0]) * 1e-9 for mark in self._marks]

    def passed(self) -> int:
        """See `Recorder`."""
        return len(self._marks)


class CudaRecorder:
    """CUDA events on the current stream, used again every iteration."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_marks = 0

    def mark(self) -> None:
        """See `Recorder`."""
        if self._num_marks == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._num_marks].record()
        self._num_marks += 1

    def reset(self) -> None:
        """See `Recorder`."""
        self._num_marks = 0

    def times(self) -> list[float]:
        """See `Recorder`."""
        marks = self._events[: self._num_marks]
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) * 1e-3 for mark in marks]

    def passed(self) -> int:
        """See `Recorder`."""
        events = self._events
        return bisect_left(
            range(self._num_marks),
            True,
            key=lambda number: not events[number].query(),  # type: ignore[no-untyped-call]
        )


def recorder_for(device: torch.device) -> Recorder:
    """The recorder of a device."""
    return CudaRecorder() if device.type == "cuda" else HostRecorder()


def marks_of(waits: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """For each action of an order the marks at its start and its end, by whether it waits.

    There is a mark at the start of the iteration, one behind every wait and one behind every action.
    """
    marks, last = [], 0
    for does_wait in waits:
        start = last + does_wait
        last = start + 1
        marks.append((start, last))
    return tuple(marks)


def position_of(marks: Sequence[tuple[int, int]], passed: int) -> tuple[int, bool]:
    """The index of the action that is under way, and whether it still waits; `len(marks)` behind the last action."""
    index = bisect_left(marks, passed, key=lambda pair: pair[1])
    return index, index < len(marks) and marks[index][0] >= passed


def spans_of(
    worker: int, order: Sequence[Action], marks: Sequence[tuple[int, int]], times: Sequence[float]
) -> tuple[Span, ...]:
    """The spans of an order's actions, by the marks at their starts and ends."""
    return tuple(
        Span(worker=worker, action=action, start=times[start], end=times[end])
        for action, (start, end) in zip(order, marks, strict=True)
    )

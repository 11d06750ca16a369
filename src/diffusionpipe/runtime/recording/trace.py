"""When every action of an iteration ran, at next to no cost.

On a GPU the host is ahead of the device, so it reads the times of an iteration late: two recorders take turns, and the
times of one iteration are read while the next one runs.

    host     issue 0 | issue 1 | read 0, issue 2 | read 1, ...
    device      run 0 ........ | run 1 ......... | run 2 ...
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch

from diffusionpipe.ir import Action, Op, Span
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.units import Seconds


class StreamRecorder(Protocol):
    """Records points in time (marks) of the stream that computes."""

    @property
    def mark(self) -> Callable[[], None]:
        """A function that records a mark at the stream's present point."""
        ...

    @property
    def began(self) -> Seconds:
        """The host's clock at the first mark, in seconds; for a device, the time at which the mark was issued."""
        ...

    def reset(self) -> None:
        """Forget all marks; the next one is time 0."""
        ...

    def times(self, stop: int | None = None) -> list[Seconds]:
        """The times of the first `stop` marks (None: of all) in seconds since the first. On GPUs it waits for them."""
        ...

    def passed(self) -> int:
        """The number of marks that the stream has passed. It never waits, and any thread may call it."""
        ...

    def issued(self) -> int:
        """The number of marks since the last reset; the device may not have passed all."""
        ...


class HostRecorder:
    """Records marks by the host's clock, which is right where compute blocks the host; see `StreamRecorder`."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        # Bound once: a mark is two calls and no look-up of attributes.
        append = self._marks.append

        def mark() -> None:
            append(perf_counter_ns())

        self.mark = mark

    @property
    def began(self) -> Seconds:
        """The host's clock at the first mark; see `StreamRecorder`."""
        return self._marks[0] * 1e-9

    def reset(self) -> None:
        """Forget all marks; the next one is time 0; see `StreamRecorder`."""
        self._marks.clear()

    def times(self, stop: int | None = None) -> list[Seconds]:
        """The times of the first `stop` marks in seconds since the first; see `StreamRecorder`."""
        return [(mark - self._marks[0]) * 1e-9 for mark in self._marks[:stop]]

    def passed(self) -> int:
        """The number of marks that the stream has passed; see `StreamRecorder`."""
        return len(self._marks)

    issued = passed


class CudaRecorder:
    """Records marks as CUDA events on the current stream; the events are used again. See `StreamRecorder`."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_marks = 0
        self.began: Seconds = 0.0

    def mark(self) -> None:
        """Record a mark at the current stream's present point; see `StreamRecorder`."""
        if self._num_marks == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._num_marks].record()
        self._num_marks += 1

    def reset(self) -> None:
        """Forget all marks; the next one, which is issued at once, is time 0; see `StreamRecorder`."""
        self._num_marks = 0
        self.began = perf_counter_ns() * 1e-9

    def times(self, stop: int | None = None) -> list[Seconds]:
        """The times of the first `stop` marks in seconds since the first; it waits for them; see `StreamRecorder`."""
        marks = self._events[: self._num_marks][:stop]
        marks[-1].synchronize()
        # `elapsed_time` is in milliseconds.
        return [marks[0].elapsed_time(mark) * 1e-3 for mark in marks]

    def passed(self) -> int:
        """The number of marks that the stream has passed; see `StreamRecorder`."""
        events = self._events
        # A stream passes its events in order, so halving finds the first that it has not passed.
        return bisect_left(
            range(self._num_marks),
            True,
            key=lambda number: not events[number].query(),  # type: ignore[no-untyped-call]
        )

    def issued(self) -> int:
        """The number of marks since the last reset; see `StreamRecorder`."""
        return self._num_marks


def recorder_for(device: torch.device) -> StreamRecorder:
    """A new recorder: by CUDA events for a CUDA device, else by the host's clock."""
    return CudaRecorder() if device.type == "cuda" else HostRecorder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The times of one iteration or window of one worker; good until its recorder is reset, two iterations later."""

    worker: int
    recorder: StreamRecorder
    steps: Sequence[tuple[tuple[int, int], object]]
    """((mark at its start, mark at its end), action) of all that ran; a function in place of an action: casts of
    weights."""

    @property
    def _last_mark(self) -> int:
        # Without steps there are two marks: 0 at the start and 1 at the end of the iteration.
        return self.steps[-1][0][1] + 1 if self.steps else 1

    def is_complete(self) -> bool:
        """Whether the device has passed the iteration's end, so that no method here waits; this one never waits."""
        return self.recorder.passed() > self._last_mark

    def busy(self, *, apart_from: Op | None = None) -> tuple[Seconds, Seconds]:
        """(seconds in which the worker computed, length of the iteration in seconds); on GPUs it waits for its end.

        Both follow from the marks: on a GPU the host's clock would give the time that issuing the work took. The length
        is without the waits in front of actions with the op `apart_from`.
        """
        times = self.recorder.times(self._last_mark + 1)
        computing = [marks for marks, step in self.steps if not isinstance(step, Action) or step.op in TIMED_OPS]
        # A wait lasts from the end of the step before to the action's start.
        ends = (0, *(end for (_, end), _ in self.steps))
        waits = [
            times[start] - times[before]
            for before, ((start, _), step) in zip(ends, self.steps, strict=False)
            if apart_from and isinstance(step, Action) and step.op is apart_from
        ]
        return sum(times[end] - times[start] for start, end in computing), times[self._last_mark] - sum(waits)

    def spans(self) -> tuple[tuple[Span, ...], Seconds]:
        """(start and end of every action that ran, length of the iteration), in seconds.

        On GPUs it waits for the iteration's end.
        """
        times = self.recorder.times(self._last_mark + 1)
        spans = [
            Span(worker=self.worker, action=step, start=times[start], end=times[end])
            for (start, end), step in self.steps
            if isinstance(step, Action)
        ]
        return tuple(spans), times[self._last_mark]

    def times_after(self) -> list[Seconds]:
        """The end of the iteration and the times of later marks, in seconds from its start.

        On GPUs it waits for all.
        """
        return self.recorder.times()[self._last_mark :]

    def position(self) -> tuple[int, bool] | None:
        """(index in `steps` of the step under way, whether it still waits); the index is `len(steps)` after the last.

        None if no iteration is under way. It never waits, and any thread may call it.
        """
        passed = self.recorder.passed()
        if not 0 < passed <= self._last_mark:
            return None
        return position_of([marks for marks, _ in self.steps], passed)


def marks_of(waits: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """(number of the mark at its start, number of the mark at its end) for each action.

    `waits`: for each action, whether it has a wait. There is a mark at the start of the iteration, one after every wait
    and one after every action.
    """
    marks, last = [], 0
    for does_wait in waits:
        start = last + does_wait
        last = start + 1
        marks.append((start, last))
    return tuple(marks)


def position_of(marks: Sequence[tuple[int, int]], passed: int) -> tuple[int, bool]:
    """(index of the action under way, whether it still waits); (`len(marks)`, False) after the last action.

    `marks` as `marks_of` returns them; `passed`: the number of marks that the stream has passed.
    """
    index = bisect_left(marks, passed, key=lambda pair: pair[1])
    return index, index < len(marks) and marks[index][0] >= passed

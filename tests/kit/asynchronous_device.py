"""A device that only takes work in while the host goes on, as GPUs do; it runs when somebody waits for it.

host     mark 0, mark 1, mark 2, ...      take microseconds
device   |-- 3 s --|-- 5 s --|...         each mark is passed when all work before it has run
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diffusionpipe.units import Seconds


@dataclass(slots=True)
class AsynchronousDevice:
    """The device of one rank: marks are numbered through all recorders, in the order in which they were issued."""

    length: Callable[[], Seconds]
    """Of the work before the next mark."""
    ends: list[Seconds] = field(default_factory=list)
    """When the device passes each mark."""
    num_passed: int = 0
    waits: list[int] = field(default_factory=list)
    """For each time that the host waited for the device: the mark until which it did."""

    def issue(self) -> int:
        """Give the device some work, and a mark behind it."""
        self.ends.append((self.ends[-1] if self.ends else 0.0) + self.length())
        return len(self.ends) - 1

    def wait(self, mark: int) -> None:
        """Let the host wait until the device has passed the mark."""
        if mark >= self.num_passed:
            self.waits.append(mark)
            self.num_passed = mark + 1


class AsynchronousRecorder:
    """A `Recorder` like CUDA's: reading times waits for the device."""

    def __init__(self, device: AsynchronousDevice) -> None:
        self.device = device
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(self.device.issue())

    def reset(self) -> None:
        self._marks.clear()

    def times(self, stop: int | None = None) -> list[Seconds]:
        marks = self._marks[:stop]
        self.device.wait(marks[-1])
        return [self.device.ends[mark] - self.device.ends[marks[0]] for mark in marks]

    def passed(self) -> int:
        return sum(mark < self.device.num_passed for mark in self._marks)

    def issued(self) -> int:
        return len(self._marks)


def random_lengths(seed: int) -> Callable[[], Seconds]:
    """Lengths of work, some of them 0."""
    rng = random.Random(seed)
    return lambda: rng.choice((0.0, 1.0, 2.5, 7.0))


@dataclass(slots=True)
class PlantedQueue:
    """A device and its host with times of their own, for the profiler's clock: a `Queue`."""

    clock: Seconds = 0.0
    """The host's."""
    free: Seconds = 0.0
    """When the device has computed all that was issued."""

    def now(self) -> Seconds:
        return self.clock

    def sleep(self, seconds: Seconds) -> None:
        self.compute([seconds], 1e-6)

    def mark(self) -> "PlantedMark":
        return PlantedMark(self, max(self.free, self.clock))

    def compute(self, kernels: Sequence[Seconds], host: Seconds) -> None:
        """Issue kernels one after the other, each of which takes the host the same part of this time."""
        for kernel in kernels:
            self.clock += host / len(kernels)
            self.free = max(self.free, self.clock) + kernel


@dataclass(frozen=True, slots=True)
class PlantedMark:
    """A `Mark` that the device passes at a time that is known when it is issued."""

    queue: PlantedQueue
    at: Seconds

    def query(self) -> bool:
        return self.queue.clock >= self.at

    def synchronize(self) -> None:
        self.queue.clock = max(self.queue.clock, self.at)

    def elapsed_time(self, end_event: "PlantedMark") -> float:
        return (end_event.at - self.at) * 1000

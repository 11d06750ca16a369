"""Times and peak memory on one device.

A GPU computes what its host issues. A layer of many short kernels is over when the host has issued the last one, and a
time from its first kernel to its last one would be the host's. So the device first sleeps [1], until the host has
issued the whole layer [2]; after the sleep it computes without waiting [3]:

    host      sleep | begin | k1 k2 k3 k4 | end | wait
    device    [1] ..zzzzzzzzzzzzzzzzzzzzzzzzzzz k1k2k3k4
                            |--- [2] ---|       |- [3] -|

If the device has passed `begin` when the host comes to `end`, it may have waited for the host. Then the sleep was too
short: it is made longer, and this time does not count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Protocol, Self, TypeVar

import torch

from diffusionpipe.units import Bytes, Seconds

T = TypeVar("T")


FIRST_SLEEP: Seconds = 0.002
"""The first time for which a device sleeps, before it is known how long the host needs."""
RESOLUTION: Seconds = 5e-7
"""The resolution of the times between events of CUDA, and the least time that is measured."""


class Mark(Protocol):
    """A point in the work of a device, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed the mark."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the mark."""

    def elapsed_time(self, end_event: Self) -> float:
        """The milliseconds from this mark to a later one, `end_event`, on the device."""


class Queue(Protocol):
    """The methods to time a device that computes beside its host, which issues the work: clock, sleeps and marks."""

    def now(self) -> Seconds:
        """The host's time in seconds."""

    def sleep(self, seconds: Seconds) -> None:
        """Let the device do nothing for about `seconds`, after the work issued so far."""

    def mark(self) -> Mark:
        """A new mark after the work issued so far."""


@dataclass(frozen=True, slots=True)
class CudaQueue:
    """The current stream of a GPU as a `Queue`."""

    device: torch.device
    cycles: float
    """The number of the GPU's clock cycles in a second, by which its sleep is counted."""

    @classmethod
    def of(cls, device: torch.device) -> "CudaQueue":
        """The queue of a GPU; it first measures how fast the GPU counts cycles."""
        cycles = 10_000_000
        trial = cls(device=device, cycles=1.0)
        trial.sleep(cycles)  # the first one loads the kernel
        begin = trial.mark()
        trial.sleep(cycles)
        end = trial.mark()
        end.synchronize()
        return cls(device=device, cycles=cycles / (begin.elapsed_time(end) / 1000))

    def now(self) -> Seconds:
        """The host's time in seconds; see `Queue`."""
        return time.perf_counter()

    def sleep(self, seconds: Seconds) -> None:
        """Issue a kernel that spins for about `seconds`; see `Queue`."""
        torch.cuda._sleep(int(seconds * self.cycles))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Record an event in the device's current stream; see `Queue`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass(frozen=True, slots=True)
class Took:
    """The seconds that some work took on the device, and the seconds in which the host issued it."""

    device: Seconds
    """The time of the device."""
    host: Seconds = 0.0
    """The time of the host; 0 where host and device are the same, as for a CPU."""


@dataclass(slots=True)
class Clock:
    """Measures the time of work on a device: by events of its stream on a GPU, by clocks of the processor on a CPU.

    On a CPU with one thread it counts the thread's own processor time, so that other programs on the machine do not
    count; torch then runs a backward in the calling thread too. On a GPU it adapts how long the device must sleep.
    """

    device: torch.device
    queue: Queue | None = None
    """The queue of a device that computes beside its host; None: host and device are the same."""
    was_late: bool = False
    """Whether a device has waited for its host since this was set to False."""
    _sleep: Seconds = field(default=FIRST_SLEEP, init=False)

    @classmethod
    def of(cls, device: torch.device) -> "Clock":
        """A clock for a device: a GPU's uses its stream, any other the host's clocks."""
        return cls(device, CudaQueue.of(device) if device.type == "cuda" else None)

    def apart(self, function: Callable[[], T]) -> tuple[T, Took]:
        """Run a function; returns its result, and its time on the device and on the host, apart from each other.

        If the device had to wait for the host, `was_late` is set, and the device's time is too long.
        """
        queue = self.queue
        if queue is None:
            result, seconds = self.time(function)
            return result, Took(seconds)
        queue.sleep(self._sleep)  # [1]
        begin, start = queue.mark(), queue.now()
        result = function()
        host = queue.now() - start  # [2]
        is_late, end = begin.query(), queue.mark()
        end.synchronize()
        if is_late:
            self.was_late, self._sleep = True, max(self._sleep, 2 * host)
        return result, Took(max(begin.elapsed_time(end) / 1000, RESOLUTION), host)  # [3]

    def time(self, function: Callable[[], T]) -> tuple[T, Seconds]:
        """Run a function; returns its result and the seconds that it took. It waits for a GPU before and after."""
        if self.device.type != "cuda":
            now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            start = now()
            result = function()
            return result, now() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        begin.record()
        result = function()
        end.record()
        torch.cuda.synchronize(self.device)
        return result, begin.elapsed_time(end) / 1000


def middle(times: Sequence[Seconds]) -> Seconds:
    """The median of the times."""
    return median(times)


def spread(times: list[Seconds]) -> Seconds:
    """Half the distance between the upper and the lower quartile, in seconds; 0 for one time."""
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


@dataclass(slots=True)
class CudaPeak:
    """The bytes of tensors on a GPU, now and at their peak, by torch's allocator; see `Gauge`."""

    device: torch.device

    @property
    def live(self) -> Bytes:
        """The bytes of all tensors on the device now."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> Bytes:
        """The most bytes of tensors at once since the last restart."""
        return torch.cuda.max_memory_allocated(self.device)

    def restart_peak(self) -> None:
        """Set the peak to the bytes that live now; from then on it is counted again."""
        torch.cuda.reset_peak_memory_stats(self.device)

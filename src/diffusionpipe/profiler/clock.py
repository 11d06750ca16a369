"""Times and peak memory on one device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

import torch

from diffusionpipe.units import Bytes, Seconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clock:
    """Times what runs on a device: by events of its stream on a GPU, by clocks of the processor on a CPU.

    On a CPU with one thread it counts the thread's own processor time, so that other programs on the machine, which
    training would not share it with, do not count; torch then runs a backward in the calling thread too.
    """

    device: torch.device

    def time(self, function: Callable[[], T]) -> tuple[T, Seconds]:
        """The function's result and how long it took; waits for the device before and after."""
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
    """The median."""
    return median(times)


def spread(times: list[Seconds]) -> Seconds:
    """Half the distance between the quartiles; 0 for one time."""
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


@dataclass(slots=True)
class CudaPeak:
    """The allocator's figures, as `LiveBytes` has them for a CPU. Mutable: moves with `restart_peak`."""

    device: torch.device

    @property
    def live(self) -> Bytes:
        """Bytes in tensors now."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> Bytes:
        """The most since the last restart."""
        return torch.cuda.max_memory_allocated(self.device)

    def restart_peak(self) -> None:
        """Let the peak start from what lives now."""
        torch.cuda.reset_peak_memory_stats(self.device)

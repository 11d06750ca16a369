"""A small sum over all ranks that is brought to the host, which waits for it and for no later work of the device.

    compute   ... backward | optimizer | next iteration ...    the sum holds none of this up
    sum                    | sum over all ranks | copy         on a stream of its own; the host waits for its end

Numbers travel through page-locked memory in both directions: a copy from or to other memory makes the host wait for all
that the device has been given. On the CPU the same happens without streams.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor


class HostSum:
    """A sum of a few float64 numbers over all ranks, which runs and is copied to the host beside later work."""

    def __init__(self, own: Tensor, numbers: Sequence[float], further: Sequence[float] = ()) -> None:
        """Start the sum over all ranks of one float64 vector: `own`, on the device, and then the rank's `numbers`.

        `further` numbers are summed by another collective: with more numbers in the first one the ranks would add its
        numbers in another order, and their last digit would change.
        """
        device, length = own.device, len(own) + len(numbers)
        self._sent = _host_vector(len(numbers) + len(further), device)
        # All numbers go to the device in one copy, from page-locked memory, so the host does not wait.
        self._sent.copy_(torch.tensor([*numbers, *further], dtype=torch.float64))
        whole = torch.cat([own, self._sent.to(device, non_blocking=True)])
        self.total = whole[:length]
        """The sum of `own` and `numbers` over all ranks, on the device; it may be read there after `wait`."""
        # Views of `whole`: both collectives add up in its memory, and one copy brings both totals to the host.
        parts = [self.total, whole[length:]] if further else [self.total]
        self._works: list[dist.Work] = [dist.all_reduce(part, async_op=True) for part in parts]
        self._host, self._wait, self._length = whole, self._wait_for_works, length
        if _runs_ahead(device):
            self._start_copy(torch.get_device_module(device))

    def _start_copy(self, backend: ModuleType) -> None:
        stream, event, whole = backend.Stream(), backend.Event(), self._host
        with backend.stream(stream):
            self._wait_for_works()  # the stream, not the host
            self._host = _host_vector(len(whole), whole.device).copy_(whole, non_blocking=True)
            event.record(stream)
        self._wait = event.synchronize  # ends with the copy; later work of the device is not waited for

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()

    def wait(self) -> Tensor:
        """Waits for the sums; returns the sum of `own` and `numbers` as a float64 vector in host memory."""
        self._wait()
        return self._host[: self._length]

    def further(self) -> list[float]:
        """The sums of the `further` numbers over all ranks; call `wait` before."""
        return self._host[self._length :].tolist()


def _runs_ahead(device: torch.device) -> bool:
    """Whether the device may still compute when its host continues, as all devices but CPUs do."""
    return device.type != "cpu"


def _host_vector(length: int, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=torch.float64, pin_memory=device.type != "cpu")

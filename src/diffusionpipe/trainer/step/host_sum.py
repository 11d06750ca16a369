"""A small sum over all ranks on its way to the host, which waits for it and for nothing later.

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
    """A sum of a few float64 numbers over all ranks on its way to the host, beside later work of the device."""

    def __init__(self, own: Tensor, numbers: Sequence[float]) -> None:
        """Start the sum over all ranks of `own`, a vector on the device, followed by the rank's `numbers`; float64."""
        device = own.device
        self._sent = _host_vector(len(numbers), device).copy_(torch.tensor(numbers, dtype=torch.float64))
        self.total = torch.cat([own, self._sent.to(device, non_blocking=True)])
        """The total on the device; it may be read there after `wait`."""
        self._work: dist.Work = dist.all_reduce(self.total, async_op=True)
        self._host, self._wait = self.total, self._work.wait
        if _runs_ahead(device):
            self._start_copy(torch.get_device_module(device))

    def _start_copy(self, backend: ModuleType) -> None:
        stream, event = backend.Stream(), backend.Event()
        with backend.stream(stream):
            self._work.wait()  # the stream, not the host
            self._host = _host_vector(len(self.total), self.total.device).copy_(self.total, non_blocking=True)
            event.record(stream)
        self._wait = event.synchronize

    def wait(self) -> Tensor:
        """Waits for the sum; returns the total as a float64 vector in host memory."""
        self._wait()
        return self._host


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host may be ahead of the device."""
    return device.type != "cpu"


def _host_vector(length: int, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=torch.float64, pin_memory=device.type != "cpu")

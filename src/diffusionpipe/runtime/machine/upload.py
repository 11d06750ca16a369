"""Batches on their way to the device, on a stream beside the one that computes.

    copies    wait for `taken` | copy batch n + 1 | `arrived`
    compute   step n ............ its update ............ | wait for `arrived`, batch n + 1 into the store, `taken`

The host is ahead of the device, so a batch is copied while the device still computes the update of the step before.
The copy has the batch's own dtypes: a copy to another one would make the host convert, and wait. On the CPU the same
happens without streams.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Upload:
    """Copies the batches of one rank to its device, on a stream of its own. Mutable: its events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, torch.get_device_module(device)
        self._stream = self._backend.Stream()
        self._arrived, self._taken = self._backend.Event(), self._backend.Event()

    @contextmanager
    def brought(self, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Copy host tensors to the device; the copies, by name, may be read by work that is issued in the block."""
        yield self._copied(inputs)
        self._taken.record(self._backend.current_stream())

    def _copied(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._taken.wait(self._stream)  # the last batch's memory is used again
        with self._backend.stream(self._stream):
            copies = {name: self._copy(value) for name, value in inputs.items()}
            self._arrived.record(self._stream)
        self._arrived.wait(self._backend.current_stream())
        return copies

    def _copy(self, value: Tensor) -> Tensor:
        # Allocated on the copying stream, whose allocator gives the memory only to later copies.
        return torch.empty_like(value, device=self._device).copy_(value, non_blocking=True)

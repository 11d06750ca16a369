"""Receive buffers that are used again."""

import torch
from torch import Tensor


class BufferPool:
    """Free tensors by shape and dtype.

    Its size follows from what the schedule has in flight, not from the number of micro-batches; `num_allocated`
    counts what was ever allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self.num_allocated = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A free buffer with undefined content, or a new one."""
        free = self._free.get((shape, dtype))
        if free:
            return free.pop()
        self.num_allocated += 1
        return torch.empty(shape, dtype=dtype, device=self._device)

    def give_back(self, tensor: Tensor) -> None:
        """Return a buffer that nothing refers to any more."""
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)

    def give_all_back(self, tensors: dict[str, Tensor]) -> None:
        """Return these and empty the dictionary."""
        for tensor in tensors.values():
            self.give_back(tensor)
        tensors.clear()

"""A planted pool: activations arrive in memory that is used again, where the runtime takes new memory each time."""

from collections import deque
from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor

from diffusionpipe.runtime.engine.routing import Route
from diffusionpipe.runtime.engine.slot import Slot
from diffusionpipe.runtime.engine.transfers import Transfers
from diffusionpipe.runtime.machine.buffers import num_in_memory_of


class ReusingPool:
    """Buffers by shape and dtype; one is given out again when no tensor lies in it, but for those overlooked."""

    def __init__(self, num_overlooked: int) -> None:
        self._num_overlooked = num_overlooked
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], deque[Tensor]] = {}
        self.num_reused = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer that was asked for longest ago of those that seem free, or a new one."""
        buffers = self._buffers.setdefault((shape, dtype), deque())
        for _ in range(len(buffers)):
            buffers.rotate(-1)
            if num_in_memory_of(buffers[-1]) - self._num_overlooked <= 1:  # the pool's own
                self.num_reused += 1
                return buffers[-1].detach()
        buffers.append(torch.empty(shape, dtype=dtype))
        return buffers[-1].detach()


def planted_pools(monkeypatch, num_overlooked: int) -> dict[int, ReusingPool]:
    """Plants a pool in each rank, which is a thread; they come to stand in the result."""
    pools: dict[int, ReusingPool] = {}

    def buffer_of(self: Transfers, slot: Slot, route: Route, name: str) -> Callable[[], Tensor]:
        pool = pools.setdefault(get_ident(), ReusingPool(num_overlooked))
        shape, dtype = (route.num_rows, *self.equipment.tensors[name].shape), self.dtype(name)

        def buffer() -> Tensor:
            if name not in slot.inputs:
                slot.inputs[name] = pool.take(shape, dtype)
            return slot.inputs[name]

        return buffer

    monkeypatch.setattr(Transfers, "buffer_of", buffer_of)
    return pools

"""Memory that is written again within an iteration, and the one rule for it.

    Memory may be written again when no tensor lies in it but the one that its keeper holds.

A tensor lies in memory whichever way it came there: as what was received, as a view, a slice or an identity of it that
another stage has been handed, as what autograd saved, as what I put aside for W, as what is being sent, as a result
that the caller holds. torch counts the tensors of each storage, so nobody has to know who reads what for how long, and
the rule holds on every legal order:

    receive buffers            given out again when the pool's own tensor is alone in one (`BufferPool`)
    gradients of parameters    are added to in place, so each is moved out of memory where it is not alone
                               (`gradients.BlockGradients.settle`); buckets are memory of their own from the start
    weights come from hosts    what a layer writes must not lie in the staging memory (`host_weights.HostWeights`)
    rows of the store          written once in an iteration; results must not lie in them (`store.RowStore.lasting`)

Gradients of messages and encoder outputs on their way to a later fill are new memory each time.

>>> pool = BufferPool(torch.device("cpu"))
>>> received = pool.take((4, 6), torch.float32)
>>> handed_on = received[1:].flatten()
>>> del received
>>> pool.take((4, 6), torch.float32).data_ptr() == handed_on.untyped_storage().data_ptr(), pool.num_allocated
(False, 2)
>>> del handed_on
>>> buffer = pool.take((4, 6), torch.float32)
>>> pool.num_allocated
2
"""

from collections import deque

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """Where the memory begins in which the tensor lies; its views begin anywhere in it."""
    return tensor.untyped_storage().data_ptr()


def num_in_memory_of(tensor: Tensor) -> int:
    """How many tensors lie in the tensor's memory, with itself and with those that only torch holds."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` counts too


class BufferPool:
    """Receive buffers by shape and dtype; each is free while nothing lies in its memory.

    Nobody gives a buffer back: dropping the last tensor in it is enough. If none is free, there is a new one. So the
    number follows from what the schedule has in flight, not from the number of micro-batches; `num_allocated` counts
    what was ever allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], deque[Tensor]] = {}
        """The one that was given out or asked for longest ago comes first: in most orders it is the next to be free."""
        self.num_allocated = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A free buffer with undefined content, or a new one."""
        buffers = self._buffers.setdefault((shape, dtype), deque())
        for _ in range(len(buffers)):
            buffers.rotate(-1)
            if num_in_memory_of(buffers[-1]) == 1:
                return buffers[-1].detach()
        self.num_allocated += 1
        buffers.append(torch.empty(shape, dtype=dtype, device=self._device))
        return buffers[-1].detach()

"""A copy of tensors in host memory, from which a checkpoint is written while training changes the tensors themselves.

    main stream     ... step 5 | step 6: forward, backward ........ | update
    side stream                | copy to page-locked memory |  ^
    other thread                                            |  |  write the copy to the disk
                                             `protect`: the update waits for the copy

On a CPU the copy is done when `take` returns. The memory is kept for the next copy.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from diffusionpipe.runtime.host_memory import lock_pages, pages, unlock_pages
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)

_ALIGNMENT: Bytes = 64


class HostCopy:
    """Mutable: the memory, and the tensors in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: Mapping[str, object] = {}
        self._memory = pages(0)
        self._copies: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts to copy the tensors and returns the copies, which are complete after `wait`.

        Nobody may read the copies of the time before any more.
        """
        kinds = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            self._make_room(tensors)
            self._kinds = kinds
        if not tensors:
            return {}
        if self._stream is None:
            torch._foreach_copy_(list(self._copies.values()), list(tensors.values()))
        else:
            self._copy_beside(self._stream, tensors)
        return dict(self._copies)

    def protect(self) -> None:
        """Lets whatever the device gets to do from now on wait for the copy: it may change the tensors."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Waits until the copies are complete; any thread may call it."""
        if self._copied is not None:
            torch.cuda.set_device(self._device)  # of this thread: otherwise it would be the first one
            self._copied.synchronize()

    def _copy_beside(self, stream: torch.cuda.Stream, tensors: Mapping[str, Tensor]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for copy, tensor in zip(self._copies.values(), tensors.values(), strict=True):
                copy.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(stream)
            self._copied = stream.record_event()

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """New memory for tensors of these kinds, each with a storage of its own: others would be written with it."""
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._copies.clear()
        if self._stream is not None and len(self._memory):
            unlock_pages(self._memory, self._stream)
        self._memory = pages(0)  # before there is more: both would not fit
        self._memory = pages(end)
        if self._stream is not None and len(self._memory) and (status := lock_pages(self._memory)):
            logger.warning("page_locked=False reason=CUDA_error_%d", status)
        self._copies = {name: _in(self._memory, starts[name], tensor) for name, tensor in tensors.items()}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a dense tensor stay, because they are written too."""
    return torch.empty_like(tensor, device="meta").stride()


def _in(memory: Tensor, start: Bytes, like: Tensor) -> Tensor:
    """A tensor of the same kind whose storage is this part of the memory."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=start)
    return flat.as_strided(like.shape, _strides(like))

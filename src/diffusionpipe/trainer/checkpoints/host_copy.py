"""A copy of tensors in host memory, from which a checkpoint is written while training changes the tensors themselves.

    main thread     ... step 5 | start | step 6: forward, backward ....... | protect | update
    other thread               |       | complete      | check and write the copy to the disk

Forward and backward only read weights and the optimizer's state, so they run beside the copy; the update waits for its
end. A GPU copies on a stream of its own into page-locked memory. The memory is kept for the next copy.
"""

import logging
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from diffusionpipe.runtime.weights.host_memory import lock_pages, pages, unlock_pages
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)

_ALIGNMENT: Bytes = 64


class HostCopy:
    """Copies of tensors in host memory (page-locked for a GPU), which are made while the device computes.

    `start` begins a copy, `complete` ends it in another thread, `protect` waits before the tensors change. The next
    copy overwrites the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: Mapping[str, object] = {}
        self._memory = pages(0)
        self._copies: dict[str, Tensor] = {}
        self._sources: Mapping[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()

    def start(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begins to copy the tensors, and returns the copies by name; they hold the values after `complete`.

        They overwrite the copies that an earlier call has returned.
        """
        # With strides: the memory is copied as it is.
        kinds = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            self._make_room(tensors)
            self._kinds = kinds
        if self._stream is not None:
            self._copy_beside(self._stream, tensors)
        else:
            self._sources = tensors  # `complete` copies them, in the other thread
            self._is_copied.clear()
        return dict(self._copies)

    @torch.no_grad()
    def complete(self) -> None:
        """Waits until a GPU has made the copies, or makes the copies of tensors on a CPU.

        The thread that writes the checkpoint calls it, not training's thread.
        """
        if self._copied is not None:
            torch.cuda.set_device(self._device)  # of this thread: otherwise it would be the first one
            self._copied.synchronize()
            return
        try:
            if self._sources:
                torch._foreach_copy_(list(self._copies.values()), list(self._sources.values()))
        finally:
            self._sources = {}
            self._is_copied.set()

    def protect(self) -> None:
        """Waits until training may change the tensors without changing the copies.

        On a GPU it returns at once, but later work of the device waits for the copies.
        """
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._is_copied.wait()

    @torch.no_grad()
    def _copy_beside(self, stream: torch.cuda.Stream, tensors: Mapping[str, Tensor]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))  # the last update comes before
        with torch.cuda.stream(stream):
            for copy, tensor in zip(self._copies.values(), tensors.values(), strict=True):
                copy.copy_(tensor, non_blocking=True)
                # Its memory may be freed before the copy has run; the allocator has to wait for this stream then.
                if tensor.is_cuda:
                    tensor.record_stream(stream)
            self._copied = stream.record_event()

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes host memory and uninitialised copies for tensors of these shapes and types.

        Each copy has a storage of its own, because writing a tensor writes its whole storage.
        """
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._copies.clear()
        if self._stream is not None and len(self._memory):
            unlock_pages(self._memory, self._stream)  # pages must be unlocked before they are freed
        self._memory = pages(0)  # before there is more: both would not fit
        self._memory = pages(end)
        # Without it copies are slower, and right.
        if self._stream is not None and len(self._memory) and (status := lock_pages(self._memory)):
            logger.warning("page_locked=False reason=CUDA_error_%d", status)
        self._copies = {name: _in(self._memory, starts[name], tensor) for name, tensor in tensors.items()}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor's copy: a dense tensor's own, so that its memory is copied as it is."""
    return torch.empty_like(tensor, device="meta").stride()


def _in(memory: Tensor, start: Bytes, like: Tensor) -> Tensor:
    """A tensor with the shape and type of `like` whose values are in `memory` from byte `start` on."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=start)
    return flat.as_strided(like.shape, _strides(like))

"""Host memory in whole pages, which can be locked: a GPU then copies from and to them without the processor."""

import torch
from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.machine.free_memory import free_memory
from diffusionpipe.units import Bytes

_PAGE: Bytes = 4096


def whole_pages(size: Bytes) -> Bytes:
    """The size rounded up to whole pages of 4096 bytes."""
    return -(-size // _PAGE) * _PAGE


def check_free(size: Bytes, num_copies: int = 1) -> None:
    """Check that `num_copies` times `size` bytes of the frozen part fit in this machine's free memory.

    Where the free memory is unknown it does nothing.

    Raises:
        ConfigError: there is less free memory.
    """
    free = free_memory()
    if free is not None and num_copies * size > free:
        each = f" for each of {num_copies} ranks" if num_copies > 1 else ""
        raise ConfigError(
            f"the frozen part needs {size / 2**30:.1f} GiB of host memory{each}, of which {free / 2**30:.1f} GiB are "
            "free; free memory of this machine, or set pipeline.offload_frozen = false"
        )


def pages(size: Bytes) -> Tensor:
    """New uninitialised host memory in whole pages, uint8, (size rounded up to pages,)."""
    size = whole_pages(size)
    # A page more than needed, so that a whole page begins in it.
    memory = torch.empty(size + _PAGE, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + size]


def lock_pages(memory: Tensor) -> int:
    """Page-lock host memory in place for CUDA; returns CUDA's status, 0 for success.

    torch's own page-locked memory is rounded up to powers of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unlock_pages(memory: Tensor, stream: torch.cuda.Stream) -> None:
    """Undo `lock_pages`, when the stream has done with the memory."""
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

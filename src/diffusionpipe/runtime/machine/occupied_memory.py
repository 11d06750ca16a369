"""The memory that this process uses, as metrics name it."""

import os
from pathlib import Path

import torch

PEAK = "memory_peak_gib"
_GIB = 2**30
_PAGES = Path("/proc/self/statm")


def occupied_memory(device: torch.device) -> dict[str, float]:
    """Name of an entry in the metrics -> memory in use, in GiB.

    Of the device: allocated by tensors now, reserved by torch now, allocated at the peak; of the host: in RAM now.

    The counts are the allocator's own, so nothing waits for the device. A device without counts has no entries, and a
    host that does not show its use has none either.
    """
    found: dict[str, float] = {}
    if device.type == "cuda":
        found["memory_allocated_gib"] = torch.cuda.memory_allocated(device) / _GIB
        found["memory_reserved_gib"] = torch.cuda.memory_reserved(device) / _GIB
        found[PEAK] = torch.cuda.max_memory_allocated(device) / _GIB
    if _PAGES.exists():
        resident = int(_PAGES.read_text(encoding="ascii").split()[1])
        found["host_memory_gib"] = resident * os.sysconf("SC_PAGE_SIZE") / _GIB
    return found


def forget_peak(device: torch.device) -> None:
    """Reset the peak of allocated memory, so that it counts from now on; on devices other than CUDA do nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

"""The memory that a machine, or the control group of this process, has left."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Bytes | None:
    """Memory that can be taken without swapping, by the system's account and its control group's; None if unknown."""
    known = [found for found in (_available(proc), _left_in_group(cgroup)) if found is not None]
    return min(known, default=None)


def _available(proc: Path) -> Bytes | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group(cgroup: Path) -> Bytes | None:
    """Limit less use; what files occupy of it can be dropped."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))


def free_on(device: "torch.device") -> Bytes | None:
    """Memory that tensors on the device can still take, what torch keeps for them included; None if unknown."""
    import torch

    if device.type != "cuda":
        return free_memory()
    unused: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + unused

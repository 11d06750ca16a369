"""The memory that a machine, or the control groups of this process, have left."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Bytes | None:
    """Bytes that this process can take without swapping, by /proc/meminfo and its control groups; None if unknown."""
    known = [found for found in (_available(proc), *_left_in_groups(proc, cgroup)) if found is not None]
    return min(known, default=None)


def _available(proc: Path) -> Bytes | None:
    try:
        lines = (proc / "meminfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The names of the files in which one version of Linux control groups shows the memory of a group."""

    root: str
    """The folder of all groups, relative to the mount of control groups."""
    limit: str
    """The file in a group's folder with the most bytes that it may use."""
    used: str
    """The file in a group's folder with the bytes in use."""
    files: str
    """The key in memory.stat for the memory of files that can be dropped, with the groups inside the group."""


_SECOND = _Version(root=".", limit="memory.max", used="memory.current", files="inactive_file")
_FIRST = _Version(
    root="memory", limit="memory.limit_in_bytes", used="memory.usage_in_bytes", files="total_inactive_file"
)


def _left_in_groups(proc: Path, cgroup: Path) -> list[Bytes | None]:
    """Bytes left in the control group of this process and in each group around it; None for one without a limit."""
    # The group's path in each version; a system may have both.
    own = {_SECOND: "/", _FIRST: "/"}
    with suppress(OSError):  # then the root: a container sees its own group there
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
            number, controllers, path = line.split(":", 2)
            # The line of version 2, which has no list of controllers.
            if number == "0":
                own[_SECOND] = path
            elif "memory" in controllers.split(","):
                own[_FIRST] = path
    found = []
    for version, path in own.items():
        inner = PurePosixPath(path.lstrip("/"))
        found += [_left(cgroup / version.root / folder, version) for folder in (inner, *inner.parents)]
    return found


def _left(group: Path, version: _Version) -> Bytes | None:
    """Bytes left in the control group with this folder: its limit less its use; None without a limit.

    Memory of files counts as free, because it can be dropped.
    """
    try:
        limit = (group / version.limit).read_text(encoding="utf-8", errors="replace").strip()
        used = int((group / version.used).read_text(encoding="utf-8", errors="replace"))
        statistics = dict(
            line.split() for line in (group / "memory.stat").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except (OSError, ValueError):
        return None
    # Version 1 writes a huge number for "no limit", which `min` then passes over.
    return None if limit == "max" else max(int(limit) - used + int(statistics.get(version.files, 0)), 0)


def free_on(device: "torch.device") -> Bytes | None:
    """Bytes that tensors on the device can still take, torch's unused reserve included; None if unknown."""
    import torch

    if device.type != "cuda":
        return free_memory()
    unused: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + unused

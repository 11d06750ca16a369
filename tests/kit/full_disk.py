"""A disk without room, for tests of what is said about it."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REASONS = "No space left on device|File too large"


@contextmanager
def full_disk(folder: Path, free: int = 0) -> Iterator[Path]:
    """The folder on a disk with room for `free` bytes, a multiple of 4096.

    Where mounting is not allowed, files must stay below `free` bytes or 1 kB instead.
    """
    size = str(4096 + free)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(free, 1000), before[1]))  # Python ignores SIGXFSZ: writes raise
        try:
            yield folder
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    try:
        (folder / "fills").write_bytes(b"x" * 4096)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

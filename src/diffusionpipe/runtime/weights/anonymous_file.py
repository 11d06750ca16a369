"""Files without a name, which end with the last process that has them."""

import os
import tempfile


def anonymous_file(shown: str = "diffusionpipe") -> int:
    """A new file descriptor of a file without a name, in memory where the system has such files, else on the disk.

    `shown`: its name in /proc/PID/maps, if it is in memory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(shown)
    # The file is closed here; its copied descriptor stays open.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

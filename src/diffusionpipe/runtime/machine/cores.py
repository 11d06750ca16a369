"""Cores of this machine, how the ranks on it share them, and when a rank has none."""

import os
from collections.abc import Mapping
from pathlib import Path

from diffusionpipe.units import Seconds

_MOST = 8
"""The most data workers per rank; more of them decode no faster than a fast disk reads."""


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def data_workers_for(device_type: str, environ: Mapping[str, str]) -> int:
    """The number of data workers of a rank whose recipe leaves it open.

    With "cuda" these are the cores that this process may use, divided among the machine's ranks, less one; at least 1,
    at most 8. On CPUs a rank computes on its cores itself, and has one. The launchers say how many ranks a machine has
    (LOCAL_WORLD_SIZE in `environ`).
    """
    if device_type != "cuda":
        return 1
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    own = num_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) > 0 else 1)
    return max(1, min(_MOST, own - 1))


def cpu_wait_time() -> Seconds:
    """Seconds in which this thread has been ready to run without a core so far: the time lost to other programs.

    0 where the kernel does not count it; Linux does, in /proc/thread-self/schedstat.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0

"""What this machine has left for processes of ours: cores, memory, and how busy other programs keep it."""

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.free_memory import free_memory
from diffusionpipe.units import Bytes, Seconds

PROC = Path("/proc")
_RANK: Bytes = 2**28
"""Memory of a process that has imported torch and has no model yet; half of what was seen."""
_WORKER: Bytes = 2**26
"""The same for a data worker."""


def check_processes(ranks: int, workers: int = 0, free: Bytes | None = None) -> None:
    """Refuse a job whose Python processes alone do not fit in memory, before any model is loaded.

    Args:
        ranks: processes of the job.
        workers: data workers of each.
        free: memory that is left; None: measured.

    Raises:
        ConfigError: names what is needed and what is left.
    """
    free = free_memory() if free is None else free
    needed = ranks * (_RANK + workers * _WORKER)
    if free is not None and needed > free:
        each = f" with {workers} data workers each" if workers else ""
        raise ConfigError(
            f"{ranks} ranks{each} take at least {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are "
            f"free on this machine; use fewer ranks{' or data.workers' if workers else ''}"
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """Readings of the clocks from which the use of a span of time follows."""

    time: Seconds
    busy: Seconds
    """Processor time of all programs on all cores, and what a hypervisor has taken from them."""
    own: Seconds
    """Processor time of this process."""


def moment(proc: Path = PROC) -> Moment | None:
    """The clocks now; None on systems that do not tell."""
    try:
        name, *fields = (proc / "stat").read_text().partition("\n")[0].split()
    except OSError:
        return None
    ticks = [int(field) for field in fields]
    if name != "cpu" or len(ticks) < 8:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks[:8]
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return Moment(perf_counter(), busy / os.sysconf("SC_CLK_TCK"), process_time())


def cores_of_others(start: Moment | None, end: Moment | None, ours: Seconds = 0.0) -> float | None:
    """Cores that other programs kept busy between two moments; `ours`: processor time of processes that we started."""
    if start is None or end is None or end.time <= start.time:
        return None
    others = end.busy - start.busy - (end.own - start.own) - ours
    return max(0.0, others / (end.time - start.time))

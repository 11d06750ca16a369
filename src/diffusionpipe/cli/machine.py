"""What this machine has left for processes of ours: cores, and how busy other programs keep them."""

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from diffusionpipe.units import Seconds

PROC = Path("/proc")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

"""The share of other programs of the cores on which the ranks of a job run.

    /proc/stat        for how long each core has run no program: idle, waiting for a disk, in interrupts
    /proc/PID/stat    the processor time of the processes that a rank has started, ended ones too; its own has a clock

    cores x time - without a program - ours = the time of other programs

The kernel shows ticks of 10 ms, so one short step says little: a step is judged by a window of steps around it that is
long enough (`used_by_others`), and the error of ticks is stated (`CoreUse.doubt`). Work of another job counts as
others, and so does what a hypervisor takes. The ranks of this job never do, however many share a core.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter, process_time

from diffusionpipe.units import Seconds

PROC = Path("/proc")
WINDOW: Seconds = 1.0
"""The least time that is judged at once: over it, the ticks of a core are exact to a percent."""
_UNUSED = (3, 4, 5, 6)
"""The indices of the columns of a core in /proc/stat in which it runs no program: idle, iowait, irq, softirq. A sum of
the others is less exact, because a tick counts for the one program that runs when it comes; idle time is measured."""
_OWN, _ENDED = (11, 12), (13, 14)
"""The indices of columns after a process's name in /proc/PID/stat: its utime and stime; the same of ended children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Times that one rank reads at one moment: the clock, its cores' idle time, its processor time. All only grow."""

    clock: Seconds
    """The time by the host's clock, `perf_counter`."""
    unused: Seconds
    """Seconds in which the cores of `CorePlace` have run no program, added up over the cores."""
    own: Seconds
    """Processor time of this process."""
    helpers: Seconds
    """Processor time of the processes that it has started: its data workers."""


@dataclass(frozen=True, slots=True)
class StepCounters:
    """The counters of one rank at the beginning and at the end of a step."""

    begin: Counters
    end: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlace:
    """The machine and the cores on which one rank may run, and the numbers of its threads and data workers."""

    machine: str
    cores: tuple[int, ...]
    """The numbers of the cores that the rank may use."""
    threads: int
    """The number of its own threads that can compute at once."""
    helpers: int
    """The number of processes that it has started: its data workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """Parts of a machine's cores, from 0 to 1: used by other programs, and left by the job; and the first's error."""

    others: float
    """The part that other programs used."""
    room: float
    """The part that is left when all threads and data workers of the job compute at once."""
    doubt: float
    """The most by which `others` may be too large or too small, because counters are ticks."""


def boot_id() -> str:
    """A name of this boot of this machine, the same in all its containers; "" where the kernel gives none."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def own_cores() -> tuple[int, ...]:
    """The numbers of the cores that this process may use, sorted."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(cores))


def machine_name() -> str:
    """A name of this machine that all its processes share: the id of its boot, else its host name."""
    return boot_id() or socket.gethostname()


def place_of(threads: int) -> CorePlace:
    """The machine, cores and data workers of this process; `threads`: how many of its threads can compute at once."""
    return CorePlace(
        machine=machine_name(),
        cores=own_cores(),
        threads=threads,
        helpers=len(_children(PROC / "self")),
    )


def cores_of(places: Sequence[CorePlace], machine: str) -> tuple[int, ...]:
    """The numbers of all cores that the ranks on a machine may use, sorted; `places`: of all ranks."""
    return tuple(sorted({core for place in places if place.machine == machine for core in place.cores}))


def read_counters(cores: Iterable[int]) -> Counters | None:
    """The counters of this process now, with the idle time of these `cores`; None where the kernel shows none."""
    names = {f"cpu{core}" for core in cores}
    try:
        rows = [line.split() for line in (PROC / "stat").read_text(encoding="ascii").splitlines()]
        unused = [sum(int(row[1 + column]) for column in _UNUSED) for row in rows if row[0] in names]
        helpers = _ticks(PROC / "self", _ENDED) + sum(map(_family_ticks, _children(PROC / "self")))
    except (OSError, IndexError, ValueError):
        return None
    if not unused:
        return None
    tick = _tick()
    return Counters(clock=perf_counter(), unused=sum(unused) * tick, own=process_time(), helpers=helpers * tick)


def _tick() -> Seconds:
    return 1 / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path, columns: Sequence[int]) -> int:
    # The name in brackets may hold spaces and brackets, so fields are counted from the last bracket on.
    words = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return sum(int(words[column]) for column in columns)


def _family_ticks(process: Path) -> int:
    """The processor time of a process and of all that it has started, in ticks; 0 if the process has just ended.

    It then counts among its parent's ended children. `process`: its folder in /proc.
    """
    try:
        return _ticks(process, (*_OWN, *_ENDED)) + sum(map(_family_ticks, _children(process)))
    except OSError:
        return 0


def _children(process: Path) -> list[Path]:
    """The folders in /proc of the processes that a process has started; none where the kernel does not list them."""
    texts = []
    for thread in (process / "task").glob("*/children"):
        try:
            texts.append(thread.read_text(encoding="ascii"))
        except OSError:  # this thread has just ended
            continue
    return [PROC / number for number in chain.from_iterable(text.split() for text in texts)]


def used_by_others(places: Sequence[CorePlace], ranks: Sequence[Sequence[StepCounters]]) -> list[CoreUse]:
    """For each step, the use of cores on the machine where `others` exceeds `room` the most.

    It is measured in a window of steps around the step that lasts `WINDOW` seconds, if there are enough. `places`: the
    machine and cores of each rank. `ranks`: the counters of each rank, step by step.
    """
    machines = sorted({place.machine for place in places})
    members = [[rank for rank, place in enumerate(places) if place.machine == machine] for machine in machines]
    uses = [
        [_use([places[rank] for rank in own], [ranks[rank] for rank in own], step) for own in members]
        for step in range(len(ranks[0]))
    ]
    return [max(of_step, key=lambda use: use.others - use.room) for of_step in uses]


def _use(places: Sequence[CorePlace], ranks: Sequence[Sequence[StepCounters]], step: int) -> CoreUse:
    """The use of one machine's cores in the window around a step.

    `places`, `ranks`: as in `used_by_others`, of the ranks on this machine alone.
    """
    first, last, count = step, step, len(ranks[0])
    # The window grows on both sides; ranks meet in every step, so the clock of one serves for all.
    while ranks[0][last].end.clock - ranks[0][first].begin.clock < WINDOW and last - first + 1 < count:
        first, last = max(0, first - 1), min(count - 1, last + 1)
    spans = [StepCounters(rank[first].begin, rank[last].end) for rank in ranks]
    cores = len(cores_of(places, places[0].machine))
    helpers = sum(place.helpers for place in places)
    threads = sum(place.threads for place in places) + helpers
    seconds = spans[0].end.clock - spans[0].begin.clock
    return CoreUse(
        others=other_cpu_load(cores, spans) / cores,
        room=max(0.0, 1 - threads / cores),
        # One tick for each core's idle time and for each data worker; the ranks' own times are exact.
        doubt=min(1.0, _tick() * (cores + helpers) / (cores * seconds)),
    )


def other_cpu_load(num_cores: int, spans: Sequence[StepCounters]) -> float:
    """The number of cores of one machine that other programs kept busy, on average over the recorded time.

    `num_cores`: cores that the job may use. `spans`: the counters of each rank on the machine, over the same time.
    """
    clock = spans[0]
    seconds, unused = clock.end.clock - clock.begin.clock, clock.end.unused - clock.begin.unused
    ours = sum(one.end.own + one.end.helpers - one.begin.own - one.begin.helpers for one in spans)
    return max(0.0, num_cores * seconds - unused - ours) / seconds

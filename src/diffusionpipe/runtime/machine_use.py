"""What other programs use of the cores on which the ranks of a job run.

    /proc/stat        for how long each core has run no program: idle, waiting for a disk, in interrupts
    /proc/PID/stat    the processor time of a rank and of the processes that it has started, ended ones too

    cores x time - without a program - ours = what other programs used

Both count ticks of 10 ms, so one short step says little: a step is judged by a window of steps around it that is long
enough (`used_by_others`). Work of another job counts as others, and so does what a hypervisor takes. The ranks of this
job never do, however many share a core.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from diffusionpipe.units import Seconds

PROC = Path("/proc")
WINDOW: Seconds = 0.5
"""Over so long a time ticks are known to a few percent of a core."""
_UNUSED = (3, 4, 5, 6)
"""Columns of a core in /proc/stat: idle, iowait, irq, softirq. A sum of the others is less exact, because a tick counts
for the one program that runs when it comes; what is idle is measured."""
_OWN, _ENDED = (11, 12), (13, 14)
"""Columns behind a process's name in /proc/PID/stat: utime and stime, and those of its ended children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What one rank reads at one moment. All but the cores only grow."""

    clock: Seconds
    unused: Seconds
    """For how long the cores of `Place` have run no program, added up."""
    own: Seconds
    """Processor time of this process,"""
    helpers: Seconds
    """and of those that it has started: its data workers."""


@dataclass(frozen=True, slots=True)
class StepCounters:
    """What one rank reads before and after a step."""

    begin: Counters
    end: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs."""

    machine: str
    cores: tuple[int, ...]
    """That it may use."""
    threads: int
    """That can compute at once: its own and those of its helpers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Of the cores of one machine that the job may use."""

    others: float
    """The part that other programs used,"""
    room: float
    """and the part that is left where all threads of the job compute at once."""


def boot_id() -> str:
    """A name of this boot of this machine, the same in all its containers; "" where the kernel gives none."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def place_of(threads: int) -> Place:
    """Where this process runs; `threads`: its own that compute at once."""
    machine = boot_id() or socket.gethostname()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Place(machine=machine, cores=tuple(sorted(cores)), threads=threads + len(_children(PROC / "self")))


def cores_of(places: Sequence[Place], machine: str) -> tuple[int, ...]:
    """All cores that ranks of a machine may use."""
    return tuple(sorted({core for place in places if place.machine == machine for core in place.cores}))


def read_counters(cores: Iterable[int], clock: Seconds) -> Counters | None:
    """The counters of this process and of these cores; None where the kernel does not show them."""
    names = {f"cpu{core}" for core in cores}
    try:
        rows = [line.split() for line in (PROC / "stat").read_text(encoding="ascii").splitlines()]
        unused = [sum(int(row[1 + column]) for column in _UNUSED) for row in rows if row[0] in names]
        own = _ticks(PROC / "self", _OWN)
        helpers = _ticks(PROC / "self", _ENDED) + sum(map(_family_ticks, _children(PROC / "self")))
    except (OSError, IndexError, ValueError):
        return None
    tick = 1 / os.sysconf("SC_CLK_TCK")
    return Counters(clock=clock, unused=sum(unused) * tick, own=own * tick, helpers=helpers * tick) if unused else None


def _ticks(process: Path, columns: Sequence[int]) -> int:
    words = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return sum(int(words[column]) for column in columns)


def _family_ticks(process: Path) -> int:
    """Of a process and all below it; 0 if it has just ended: then it counts among the ended ones."""
    try:
        return _ticks(process, (*_OWN, *_ENDED)) + sum(map(_family_ticks, _children(process)))
    except OSError:
        return 0


def _children(process: Path) -> list[Path]:
    """The processes that any thread of a process has started; none where the kernel does not list them."""
    texts = []
    for thread in (process / "task").glob("*/children"):
        try:
            texts.append(thread.read_text(encoding="ascii"))
        except OSError:  # this thread has just ended
            continue
    return [PROC / number for number in chain.from_iterable(text.split() for text in texts)]


def used_by_others(places: Sequence[Place], ranks: Sequence[Sequence[StepCounters]]) -> list[Use]:
    """For each step what other programs used, on the machine on which they leave least.

    `ranks`: what each rank has read, step by step.
    """
    machines = sorted({place.machine for place in places})
    members = [[rank for rank, place in enumerate(places) if place.machine == machine] for machine in machines]
    uses = [
        [_use([places[rank] for rank in own], [ranks[rank] for rank in own], step) for own in members]
        for step in range(len(ranks[0]))
    ]
    return [max(of_step, key=lambda use: use.others - use.room) for of_step in uses]


def _use(places: Sequence[Place], ranks: Sequence[Sequence[StepCounters]], step: int) -> Use:
    """Of one machine, in the window around a step."""
    first, last, count = step, step, len(ranks[0])
    while ranks[0][last].end.clock - ranks[0][first].begin.clock < WINDOW and last - first + 1 < count:
        first, last = max(0, first - 1), min(count - 1, last + 1)
    spans = [(rank[first].begin, rank[last].end) for rank in ranks]
    begin, end = spans[0]
    cores = len(cores_of(places, places[0].machine))
    whole = cores * (end.clock - begin.clock)
    ours = sum(after.own + after.helpers - before.own - before.helpers for before, after in spans)
    others = max(0.0, whole - (end.unused - begin.unused) - ours)
    threads = sum(place.threads for place in places)
    return Use(others=others / whole if whole > 0 else 0.0, room=max(0.0, 1 - threads / cores))

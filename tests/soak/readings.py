"""What the processes of a job hold, read again and again, and whether it grows."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

MOST_GROWTH = 0.01
"""Of memory, from the first span to the last."""
_ROW = "{:20}{:>8}{:>12}{:>9}{:>12}{:>14}"


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment."""

    descriptors: int
    threads: int
    memory: int
    """Resident bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """What was read in a span of time: readings by process, and bytes in /dev/shm."""

    start: float
    readings: Mapping[str, Sequence[Reading]]
    shared: Sequence[int]

    def rests(self) -> dict[str, tuple[int, int]]:
        """Descriptors and threads by process while it does nothing special: the fewest."""
        return {
            name: (min(one.descriptors for one in found), min(one.threads for one in found))
            for name, found in self.readings.items()
        }

    def memory(self) -> dict[str, float]:
        """Resident bytes by process."""
        return {name: median(one.memory for one in found) for name, found in self.readings.items()}

    def rows(self) -> list[str]:
        """The lines of the table."""
        memory, rests = self.memory(), self.rests()
        return [
            _ROW.format(
                name,
                f"{self.start / 60:.0f}",
                f"{rests[name][0]}",
                f"{rests[name][1]}",
                f"{memory[name] / 2**20:.1f}",
                f"{min(self.shared)}",
            )
            for name in sorted(self.readings)
        ]


def head() -> str:
    """The names of the columns."""
    return _ROW.format("process", "minute", "descriptors", "threads", "memory MiB", "/dev/shm bytes")


def read(processes: Mapping[str, psutil.Process]) -> dict[str, Reading]:
    """The processes now."""
    found = {}
    for name, process in processes.items():
        with suppress(psutil.Error), process.oneshot():
            found[name] = Reading(process.num_fds(), process.num_threads(), process.memory_info().rss)
    return found


def shared_bytes(owners: Sequence[int]) -> int:
    """Bytes of the files in /dev/shm that these processes have open, and of those that bear one of their numbers."""
    shared = Path("/dev/shm")
    names = {str(path) for path in shared.iterdir() if any(str(owner) in path.name for owner in owners)}
    for owner in owners:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{owner}/fd").iterdir():
                with suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("/dev/shm/"):
                        names.add(target.removesuffix(" (deleted)"))
    total = 0
    for name in names:
        with suppress(OSError):
            total += Path(name).stat().st_size
    return total


def growth(spans: Sequence[Span]) -> list[str]:
    """What the last span holds more of than the first, in words."""
    first, last = spans[0], spans[-1]
    problems = []
    if first.readings.keys() != last.readings.keys():
        problems.append(f"processes were {sorted(first.readings)} and are {sorted(last.readings)}")
    for name in sorted(first.readings.keys() & last.readings.keys()):
        before, after = first.rests()[name], last.rests()[name]
        for kind, old, new in zip(("descriptors", "threads"), before, after, strict=True):
            if new > old:
                problems.append(f"{name}: {new} {kind} after {old}")
        old_memory, new_memory = first.memory()[name], last.memory()[name]
        if new_memory > old_memory * (1 + MOST_GROWTH):
            problems.append(f"{name}: {new_memory / 2**20:.1f} MiB after {old_memory / 2**20:.1f}")
    if min(last.shared) > min(first.shared):
        problems.append(f"/dev/shm: {min(last.shared)} bytes after {min(first.shared)}")
    return problems

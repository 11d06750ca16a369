"""A rank's work of this moment, for its watchdog to tell progress from a stop.

The main thread says which phase it is in and counts the work done there (layers, pictures, parameters). Within an
iteration it says nothing: the executor records the time of every action anyway, and the number of times recorded is the
position in the order. So the executor's loop has no extra work. The watchdog's thread asks for the `Moment` with every
beat. Whether the main thread waits for other ranks follows from its Python frames.

A second thread may work beside the main one (`beside`), e.g. write a checkpoint. It has a limit of its own, as phases
outside of steps have: it may be slow, but where it hangs, so does the rank.
"""

import linecache
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Literal, Protocol, TypeVar

from diffusionpipe.units import Seconds

T = TypeVar("T")

STEP = "step"
"""The phase in which a step is under way; its limit is the shortest."""
RECORDING = "recording metrics and samples"
"""The phase in which files and trackers are written: a tracker's server may be slow."""
PLANNING = "planning"
"""The phase without a limit: the search for a plan computes and waits for nothing."""
LEAST: Seconds = 60.0
"""The limit of a step is at least this."""
MEDIANS = 20
"""The limit of a step is at least this number of median steps, if the limit is "auto"."""
PATIENCE_ELSEWHERE = 10
"""The limit of the other phases divided by the limit of a step."""
_IO_UNIT = 16
"""Log2 of the number of bytes read or written that counts as progress: a line in a log has fewer."""

Limit = float | Literal["auto"] | None
"""The limit of time without progress in a step: seconds, "auto" for a multiple of the median step, None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The action of an iteration that is under way, and the ranks that it waits for."""

    action: str
    """The action in words, as `engine.executor.named` gives it; "the end of the iteration" while its transfers end."""
    awaited: tuple[int, ...] | None = None
    """The ranks that the action waits for; () where they are not known, None if it runs."""


class Located(Protocol):
    """An executor whose position in an iteration can be asked for from any thread."""

    def passed(self) -> tuple[int, ...]:
        """Numbers that change with every action: iterations begun, and marks of time passed in each of the last two."""
        ...

    def whereabouts(self) -> Whereabouts | None:
        """The action under way and the ranks that it waits for; None between iterations."""
        ...


class Helpers(Protocol):
    """Processes that work for a rank (data workers), as progress sees them."""

    @property
    def awaited(self) -> int | None:
        """The id of the process that the rank waits for; None: for none."""
        ...

    def stacks(self) -> str:
        """The Python stacks of these processes, as one text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The work of a rank at one moment: phase, step, action, awaited ranks, and the time since its last progress."""

    rank: int
    phase: str
    step: int
    """The step under way, counted from 1; 0 before the first."""
    action: str = ""
    """The action under way in words; "" if there is none."""
    helper: int | None = None
    """The process id of the data worker that it waits for; None: it waits for none."""
    waits: tuple[int, ...] | None = None
    """The ranks that it waits for; () means all others, None that it waits for no rank."""
    still: Seconds = 0.0
    """The time since the rank's last progress, in seconds."""
    limit: Seconds | None = None
    """The time without progress that is allowed in this phase, in seconds; None: any."""

    @property
    def is_over_limit(self) -> bool:
        """Whether the time since the last progress is over the limit; False without a limit."""
        return self.limit is not None and self.still > self.limit

    def place(self) -> str:
        """The phase or step, the action and the awaited data worker in words, for messages: "step 7, action 1F0"."""
        # Before the first step there is no number to show.
        what = self.phase if self.phase != STEP or self.step == 0 else f"step {self.step}"
        text = what if what.startswith(STEP) or self.step == 0 else f"{what} (step {self.step})"
        text += f", {self.action}" if self.action else ""
        return text + (f", waiting for its data worker (process {self.helper})" if self.helper is not None else "")


@dataclass(slots=True)
class _Beside:
    """The work of a thread beside the main one, and its progress as the watchdog's thread has seen it last."""

    name: str
    """The work in words, such as "writing the checkpoint"."""
    thread: int
    """The number that the system gives the thread."""
    seen: int = -1
    """The bytes that the thread has read and written, in units of 2 ** `_IO_UNIT`."""
    still: Seconds = 0.0
    """The time since the thread's last progress, in seconds."""


class Progress:
    """Counts the work of one rank, so that a watchdog sees whether the rank makes progress.

    Mutable: its main thread writes, its watchdog's thread reads.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        """The training step under way, counted from 1; 0 before the first."""
        self.executors: Sequence[Located] = ()
        """The executors of this rank, which are asked for its position in an iteration."""
        self.folder: Path | None = None
        """The folder to which stacks are written; None: they are not."""
        self._stuck_after: Limit = None
        self._thread = threading.get_ident()
        self._phases = ["starting"]
        self._count = 0
        self._waits = self._is_taking = False
        self._helpers: Helpers | None = None
        # The last steps alone, so the limit follows when steps become longer or shorter.
        self._durations: deque[Seconds] = deque(maxlen=31)
        self._seen: object = None
        self._still = 0.0
        self._beside: _Beside | None = None

    # The main thread.

    def configure(self, stuck_after: Limit, folder: Path | None) -> None:
        """Set the limit of time without progress in a step, and the folder for stacks; None: no limit, no stacks."""
        self._durations.clear()
        self._stuck_after, self.folder = stuck_after, folder

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While the block runs, the rank is in the phase `name`, e.g. "saving"; then again in the phase before."""
        self._phases.append(name)
        self._count += 1
        try:
            yield
        finally:
            self._phases.pop()
            self._count += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the block runs, the rank counts as waiting for all other ranks."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def help_from(self, helpers: Helpers) -> None:
        """Note the data workers of this rank, until `taken` ends."""
        self._helpers = helpers

    def taken(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """Yield the batches; while the next one is fetched, the rank counts as waiting for a data worker."""
        try:
            while True:
                self._is_taking = True
                # None is never a batch.
                batch = next(batches, None)
                self._is_taking = False
                if batch is None:
                    return
                yield batch
        finally:
            self._is_taking = False
            if isinstance(batches, Generator):
                batches.close()
            self._helpers = None

    def helper_stacks(self) -> str:
        """The Python stacks of the data workers as one text; "" without data workers."""
        helpers = self._helpers
        return helpers.stacks() if helpers is not None else ""

    def advance(self) -> None:
        """Count a part of the phase's work as done."""
        self._count += 1

    def end_step(self, seconds: Seconds) -> None:
        """Count a step as done, and note its duration for the limit "auto"."""
        self._durations.append(seconds)
        self._count += 1

    # Another thread.

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """While the block runs, its thread works beside the main one, e.g. "writing the checkpoint"; one at a time."""
        self._beside = _Beside(name, threading.get_native_id())
        try:
            yield
        finally:
            self._beside = None

    # The watchdog's thread.

    def limit(self) -> Seconds | None:
        """The time without progress that is allowed in the present phase; None: any."""
        return self._limit_in(self._phases[-1])

    def _limit_in(self, phase: str) -> Seconds | None:
        if self._stuck_after is None or phase == PLANNING:
            return None
        # A copy: the main thread adds durations meanwhile.
        if self._stuck_after == "auto":
            durations = tuple(self._durations)
            limit = max(LEAST, MEDIANS * median(durations)) if durations else LEAST
        else:
            limit = self._stuck_after
        # Loading, planning and saving have no typical length, hence the longer limit.
        return limit if phase == STEP else limit * PATIENCE_ELSEWHERE

    def pause(self, interval: Seconds) -> Seconds:
        """The time until the watchdog looks again: `interval`, or a quarter of the present limit if that is less."""
        limit = self.limit()
        # A short limit would otherwise be over long before the next look.
        return interval if limit is None else min(interval, limit / 4)

    def look(self, elapsed: Seconds) -> Moment:
        """The work of the rank now: of its main thread, or of the thread beside it if that one alone is over its limit.

        `elapsed`: the time since the last look.
        """
        mine, beside = self._look_at_main(elapsed), self._look_beside(elapsed)
        return beside if beside is not None and beside.is_over_limit and not mine.is_over_limit else mine

    def _look_beside(self, elapsed: Seconds) -> Moment | None:
        work = self._beside
        if work is None:
            return None
        # This work counts no parts; the bytes that it moves show that it lives.
        seen = bytes_moved(thread=work.thread) >> _IO_UNIT
        work.still = work.still + elapsed if seen == work.seen else 0.0
        work.seen = seen
        limit = self._limit_in(work.name)
        return Moment(rank=self.rank, phase=work.name, step=self.step, still=work.still, limit=limit)

    def _look_at_main(self, elapsed: Seconds) -> Moment:
        phase, limit, helpers = self._phases[-1], self.limit(), self._helpers
        helper = helpers.awaited if self._is_taking and helpers is not None else None
        # In a step the executor's marks show progress; reading /proc would add nothing.
        io = bytes_moved(helper) if phase != STEP or helper is not None else 0
        seen = (phase, self._count, helper, io >> _IO_UNIT, [executor.passed() for executor in self.executors])
        self._still = self._still + elapsed if seen == self._seen else 0.0
        self._seen = seen
        where = next(filter(None, (executor.whereabouts() for executor in self.executors)), None)
        waits: tuple[int, ...] | None = where.awaited if where is not None else () if self._waits else None
        # Only of a thread that has done nothing for a while: whoever holds the frame of a function that returns may
        # have to free its tensors.
        if waits is None and limit is not None and self._still > limit / 2:
            waits = () if is_in_collective(sys._current_frames().get(self._thread)) else None
        return Moment(
            rank=self.rank,
            phase=phase,
            step=self.step,
            action=where.action if where is not None else "the sum over all ranks" if self._waits else "",
            helper=helper,
            waits=waits,
            still=self._still,
            limit=limit,
        )


_COLLECTIVES = {
    ("torch.distributed.distributed_c10d", None),
    ("diffusionpipe.runtime.job.watchdog", "_finish"),
    ("diffusionpipe.runtime.job.process_group", "gather_via_store"),
}
"""(module, function) of the code in which a rank waits for other ranks; None as function means the whole module."""


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks, by its innermost frame: in torch's collectives or a transfer's `wait`."""
    innermost = frame
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if (module, None) in _COLLECTIVES or (module, frame.f_code.co_name) in _COLLECTIVES:
            return True
        frame = frame.f_back
    # `Work.wait` is C++ and has no frame of its own, so the line of its caller must tell.
    if innermost is None or innermost.f_lineno is None:
        return False
    return ".wait()" in linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)


def bytes_moved(process: int | None = None, thread: int | None = None) -> int:
    """Bytes that a process has read and written since its start, without messages; 0 if the system does not say.

    `process`: its id, None for this one. `thread`: count this thread of it alone.
    """
    total, place = 0, f"/proc/{process or 'self'}" + (f"/task/{thread}" if thread is not None else "")
    with suppress(OSError, ValueError), open(f"{place}/io", encoding="ascii") as file:
        total = sum(int(line.split()[1]) for line in file if line.startswith(("rchar:", "wchar:")))
    return total

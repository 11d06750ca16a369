"""Ranks that are frozen while their job ends: they cannot end by themselves.

Torch's agent waits 30 s for them if the job fails, and for ever if the other ranks have done all their work. A process
that was stopped (SIGSTOP, a debugger) or that waits for a device or a network file system does not answer, so the other
ranks end because of it. The launcher then kills it at once, and remembers that it was frozen: otherwise it would look
like a rank that somebody has killed.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from diffusionpipe.runtime.job.verdict import FROZEN, state_of_process
from diffusionpipe.units import Seconds

_PATIENCE: dict[str, Seconds] = {"T": 0.5, "t": 0.5, "D": 5.0}
"""State of a process, as Linux names it -> the time for which a rank must have been in it to count as frozen.

Every process waits for a disk ("D") now and then.
"""
_LAST: Seconds = 8.0
"""The longest time for which a rank may be frozen after another one has ended well: it only has to end, too."""
_ENDED = ("", "Z", "X")
"""States of processes that do not exist any more, or wait to be forgotten."""


class FrozenRanks:
    """Watches the processes of a job's ranks, and kills the ones that are frozen while the job ends."""

    def __init__(self) -> None:
        self.killed: dict[int, str] = {}
        """Why each rank that was killed here counts as frozen."""
        self._since: dict[int, tuple[str, Seconds]] = {}

    def look(self, pids: Sequence[int], is_failing: Callable[[], bool]) -> None:
        """Kills the ranks that are frozen, if the job ends. The launcher calls it several times a second.

        `pids`: the process ids by rank. `is_failing`: whether a rank has left a note of its failure; it is only called
        if a rank is frozen. Ranks end well only after all have done their work. Without a note and with all ranks
        alive, a rank that was paused can continue later.
        """
        now = time.monotonic()
        states = [state_of_process(pid) for pid in pids]
        for rank, (pid, found) in enumerate(zip(pids, states, strict=True)):
            state = found or ""
            before, since = self._since.get(rank, ("", now))
            since = since if state == before else now  # counts from the last change of the state
            self._since[rank] = state, since
            if state not in FROZEN or now - since < _PATIENCE[state] or rank in self.killed:
                continue
            if is_failing() or (now - since >= _LAST and any(other in _ENDED for other in states)):
                self.killed[rank] = FROZEN[state]
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # its data workers too

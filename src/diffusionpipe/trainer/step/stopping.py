"""When to save, to draw and to stop: signals and signal files, agreed on by all ranks at a step's end.

    SIGTERM, SIGINT (Ctrl-C)   save and stop after this step; a second SIGINT ends the process at once
    SIGHUP                     the same, unless it is ignored (nohup)
    SIGUSR1                    save after this step and continue
    RUN/save                   the same, by creating a file in the run folder (rank 0 looks once per second)
    RUN/save_quit              save and stop
    RUN/draw                   draw the samples of the recipe after this step and continue

A signal reaches the ranks at different steps, so no rank acts alone: each adds its votes to a sum over all ranks
(`votes`, `decision`). A rank whose peer died never saves:
its state may be half a step ahead of the others'.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from diffusionpipe.errors import PeerError
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

Votes: TypeAlias = tuple[int, int, int]
"""The numbers of ranks that want to save, to stop, and to draw samples."""

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOPPING = "saving and stopping after this step signal=%s"
_LOOK: Seconds = 1.0
SAVE, SAVE_AND_STOP, DRAW = "save", "save_quit", "draw"
"""The names of signal files: a user makes one in the run folder to ask the run to save, save and stop, or draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether all ranks save, stop or draw at the end of this step."""

    saves: bool
    stops: bool
    draws: bool = False

    @property
    def needs_weights(self) -> bool:
        """Whether the decision needs the weights after the step, because the run saves, stops or draws."""
        return self.saves or self.stops or self.draws

    def joined(self, other: "Decision") -> "Decision":
        """The decision to save, stop or draw if this one or the other does so."""
        return Decision(
            saves=self.saves or other.saves, stops=self.stops or other.stops, draws=self.draws or other.draws
        )


def _is_one_of_several() -> bool:
    """Whether this process is a rank of a job with several ranks."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1


class Stopping:
    """Collects the wishes of one process to save, to draw or to stop, from signals and signal files.

    `folder` is the run folder on the one rank that looks for signal files (rank 0), else None. `peer_failure` returns
    the error that names the rank that has died, None while all live.
    """

    def __init__(self, *, folder: Path | None, peer_failure: Callable[[], PeerError | None] = lambda: None) -> None:
        self._folder, self._peer_failure = folder, peer_failure
        self._wants_save = self._wants_stop = self._wants_drawing = False
        self._is_listening = self._has_agreed_to_stop = False
        self._unsaid: str | None = None
        """The name of a signal to stop that is not logged yet; None if there is none."""
        self._looked = -_LOOK  # the first vote looks at once
        self._unremovable: set[Path] = set()

    @contextmanager
    def listening(self) -> Iterator["Stopping"]:
        """A context in which signals are noted as wishes in place of ending the process; enter it in the main thread.

        Signal files of an earlier run are removed. After the block a rank of several ignores SIGTERM if it has failed,
        and SIGTERM and SIGHUP if all have agreed to stop.
        """
        for file in self._signal_files():
            logger.warning("removed a leftover signal file file=%s", file)
            self._remove(file)
        heard = [*_STOP, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            heard.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in heard}
        self._is_listening = True
        # This cannot be undone, so `_leave_in_child` asks whether the block still runs.
        os.register_at_fork(after_in_child=self._leave_in_child)
        try:
            with _second_interrupt_ends():
                yield self
            # A signal reaches the ranks one by one, and the last of them may have saved with the others before its own
            # signal comes. It would die of it, and the job would count as killed.
            if self._has_agreed_to_stop and _is_one_of_several():
                before[signal.SIGTERM] = before[signal.SIGHUP] = signal.SIG_IGN
        except BaseException:
            # The launcher sends SIGTERM to all that are left as soon as one rank has died, and this one has yet to
            # leave the note that says why it ends.
            if _is_one_of_several():
                before[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            self._is_listening = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def votes(self) -> Votes:
        """The wishes of this process, 0 or 1 each, to be summed over all ranks.

        Wishes to save and to draw are then forgotten; a wish to stop stays.
        """
        self._look()
        votes = int(self._wants_save), int(self._wants_stop), int(self._wants_drawing)
        # A wish to stop stays until the run ends.
        self._wants_save = self._wants_drawing = False
        return votes

    def decision(self, total: Votes) -> Decision:
        """The decision whether all ranks save, stop or draw, by the sum of all ranks' votes; a stop saves too.

        Raises:
            PeerError: another rank has died, so no rank saves.
        """
        failure = self._peer_failure()
        if failure is not None:
            raise failure
        saves, stops, draws = total
        if stops and self._unsaid is not None:
            logger.warning(_STOPPING, self._unsaid)
            self._unsaid = None
        self._has_agreed_to_stop = self._has_agreed_to_stop or stops > 0
        return Decision(saves=saves > 0 or stops > 0, stops=stops > 0, draws=draws > 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._wants_save = True
        else:
            self._wants_stop = True
            if number != signal.SIGINT and _is_one_of_several():
                # A launcher sends SIGTERM to the ranks that are left when one has died. Then no rank saves, and this
                # one may hear of the signal before it hears of the death: `decision` says which of them it was.
                self._unsaid = signal.Signals(number).name

    def _leave_in_child(self) -> None:
        # A forked data worker must die of SIGTERM, and leave Ctrl-C, which reaches the whole group, to its parent.
        if self._is_listening:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _look(self) -> None:
        if time.monotonic() - self._looked < _LOOK:  # a look at a shared file system costs milliseconds
            return
        self._looked = time.monotonic()
        for file in self._signal_files():
            logger.info("found a signal file file=%s", file)
            self._wants_save = self._wants_save or file.name != DRAW
            self._wants_stop = self._wants_stop or file.name == SAVE_AND_STOP
            self._wants_drawing = self._wants_drawing or file.name == DRAW
            self._remove(file)

    def _signal_files(self) -> list[Path]:
        if self._folder is None:
            return []
        files = [self._folder / name for name in (SAVE, SAVE_AND_STOP, DRAW)]
        return [file for file in files if file not in self._unremovable and file.is_file()]

    def _remove(self, file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._unremovable.add(file)  # or it would save at every step
            logger.warning("cannot remove a signal file, ignoring it from now on file=%s error=%s", file, error)


@contextmanager
def _second_interrupt_ends() -> Iterator[None]:
    """A context in which a second SIGINT ends the process, even while the main thread is blocked in C++.

    Python's handlers wait for the main thread; the wake-up file descriptor is written by the C handler itself.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_count_interrupts, args=(reader,), name="second Ctrl-C", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread, which closes the reader


def _count_interrupts(reader: int) -> None:
    interrupts = 0
    # One byte for each signal, its number; empty at the end.
    while numbers := os.read(reader, 64):
        stops = [signal.Signals(number).name for number in numbers if number in _STOP]
        has_interrupt = signal.SIGINT in numbers
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            # Not through logging: the blocked main thread may hold its lock.
            os.write(2, b"second Ctrl-C: ending at once, nothing saved since the last checkpoint\n")
            os._exit(128 + signal.SIGINT)
        if has_interrupt:
            logger.warning(f"{_STOPPING} (a second Ctrl-C ends at once)", signal.SIGINT.name)
        elif stops and not _is_one_of_several():
            # Only a process alone says so here: among several, SIGTERM may follow a rank's death, and `decision`
            # speaks.
            logger.warning(_STOPPING, stops[0])
    os.close(reader)

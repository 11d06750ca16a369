"""Signals on their way from the launcher to its ranks."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from diffusionpipe.units import Seconds

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGTSTP)
"""Signals that stay ignored where they were: under nohup, and in a shell without job control."""


class ForwardedSignals:
    """Catches signals while it is entered and forwards them to the ranks, which are in sessions of their own."""

    def __init__(self) -> None:
        self.ending: int | None = None
        """The first signal that asked for the end."""
        self._pending: list[int] = []
        self._interrupts = 0
        self._is_to_pause = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "ForwardedSignals":
        # Python lets only the main thread set handlers. In another one nothing is forwarded.
        if threading.current_thread() is threading.main_thread():
            heard = [*_FORWARDED, signal.SIGTSTP]
            heard = [n for n in heard if n not in _MAY_BE_IGNORED or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._catch) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward(self, pids: Sequence[int]) -> None:
        """Sends the signals that have arrived to the ranks with the process ids `pids`.

        While `pids` is empty it keeps the signals for a later call.

        After Ctrl-Z it pauses the whole job here. Only the ranks get a signal, not their data workers, which end with
        them; SIGKILL ends both.
        """
        if self._is_to_pause:
            self._is_to_pause = False
            _pause_with(pids)
        while pids and self._pending:  # there are none before the agent has started them
            number = self._pending.pop(0)
            # A group: a killed rank cannot end its data workers.
            send = os.killpg if number == signal.SIGKILL else os.kill
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(pid, number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._is_to_pause = True
            return
        if number == signal.SIGUSR1:
            self._pending.append(number)
            return
        self.ending = self.ending or number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:  # a second Ctrl-C ends all at once
            number = signal.SIGKILL
        self._pending.append(signal.SIGTERM if number == signal.SIGHUP else number)


def _pause_with(pids: Sequence[int]) -> None:
    """Stop the ranks and their data workers, then this process until SIGCONT, then let all continue.

    `pids`: the ranks' process ids. A terminal stops only the launcher; the ranks would take it for dead, and end.
    """
    _send_to_groups(pids, signal.SIGSTOP)
    caught = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), signal.SIGTSTP)  # returns after SIGCONT
    finally:
        signal.signal(signal.SIGTSTP, caught)
        _send_to_groups(pids, signal.SIGCONT)


def _send_to_groups(leaders: Sequence[int], number: int) -> None:
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def pause(seconds: Seconds) -> int | None:
    """Waits for `seconds`; returns the number of the signal that ended the wait early, None if none did."""
    end = time.monotonic() + seconds
    with ForwardedSignals() as signals:
        while signals.ending is None and time.monotonic() < end:
            signals.forward(())
            time.sleep(0.05)
    return signals.ending

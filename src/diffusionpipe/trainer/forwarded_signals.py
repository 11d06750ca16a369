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


class ForwardedSignals:
    """Catches signals while it is entered and forwards them to the ranks, which are in sessions of their own."""

    def __init__(self) -> None:
        self.ending: int | None = None
        """The first signal that asked for the end."""
        self._pending: list[int] = []
        self._interrupts = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "ForwardedSignals":
        if threading.current_thread() is threading.main_thread():
            heard = [n for n in _FORWARDED if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]  # nohup
            self._before = {number: signal.signal(number, self._catch) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward(self, pids: Sequence[int]) -> None:
        """Send what has arrived to the ranks; kept until there are any.

        Only the ranks get it, not their data workers, which end with them; SIGKILL ends both.
        """
        while pids and self._pending:
            number = self._pending.pop(0)
            send = os.killpg if number == signal.SIGKILL else os.kill
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(pid, number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._pending.append(number)
            return
        self.ending = self.ending or number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            number = signal.SIGKILL
        self._pending.append(signal.SIGTERM if number == signal.SIGHUP else number)


def pause(seconds: Seconds) -> int | None:
    """Wait; the signal that ended the wait early, None if none did."""
    end = time.monotonic() + seconds
    with ForwardedSignals() as signals:
        while signals.ending is None and time.monotonic() < end:
            time.sleep(0.05)
    return signals.ending

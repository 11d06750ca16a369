"""One piece of work in a thread of its own, while the main thread trains on."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from diffusionpipe.runtime.job.progress import Progress
from diffusionpipe.units import Seconds

T = TypeVar("T")


class _AbandonedError(Exception):
    """The error of work for which no caller waits any more."""


class BackgroundTask(Generic[T]):
    """A function that runs in a daemon thread from the task's construction on, and its result or its error.

    The thread takes part in no communication between ranks: two threads that use one process group, or NCCL at all,
    would wait for each other. The watchdog sees it as `name`.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], name: str, progress: Progress) -> None:
        """Starts the thread, which calls `work(go_on)`.

        `work` calls `go_on` between its parts; after `abandon` that raises an error which ends the thread. `name`: the
        work in words, for messages. `progress`: where the watchdog sees the work.
        """
        self._work, self._name, self._progress = work, name, progress
        self._result: T | None = None
        self._error: Exception | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, with a result or with an error."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended with an error."""
        return self.is_done and self._error is not None

    def result(self) -> T:
        """Waits for the thread's end; returns the result of the work, or raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # without an error there is a result

    def abandon(self, patience: Seconds) -> None:
        """Asks the work to stop between two of its parts, and waits at most `patience` seconds for the thread's end."""
        self._is_abandoned = True
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            with self._progress.beside(self._name):
                self._result = self._work(self._go_on)
        except Exception as error:
            self._error = error

    def _go_on(self) -> None:
        if self._is_abandoned:
            raise _AbandonedError(self._name)

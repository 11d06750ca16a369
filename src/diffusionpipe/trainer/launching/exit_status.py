"""The exit statuses of a training, for scripts and schedulers of jobs."""

import signal
from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit status by which a training ended.

    A signal n that ends it outside of training gives 128 + n, and nothing is saved.
    """

    FINISHED = 0
    """The last step is done and the results are written."""
    FAILED = 1
    """A rank crashed, was killed, or met a loss that is not finite."""
    REFUSED = 2
    """Something that the user can fix; running the same command again gives the same error."""
    STOPPED = 75
    """Asked to stop before the last step, saved and stopped; the same command with --resume auto continues (EX_TEMPFAIL
    of sysexits.h)."""


def of_signal(number: int) -> int:
    """The exit status of a program that signal `number` has ended, 128 + number, as shells give it."""
    return 128 + number


def signal_name(number: int) -> str:
    """The signal's name, e.g. "SIGTERM"; "unknown" for a number without one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"

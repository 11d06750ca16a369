"""A process that ends with its parent, however that one ends, and whatever itself does: importing, or stopped.

Only Linux can do this (PR_SET_PDEATHSIG); on other systems these functions do nothing. The parent is the thread that
has started the process, which must therefore live as long as the process is to live.
"""

import ctypes
import os
import signal
import sys

_SET_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


def end_with_parent(parent: int) -> bool:
    """Let the system kill this process as soon as its parent has ended; returns False if that has happened already.

    `parent`: the parent's process id. Only Linux kills it.
    """
    _set_signal(signal.SIGKILL)
    return os.getppid() == parent


def outlive_parent() -> None:
    """Undo `end_with_parent`: this process no longer ends when its parent does."""
    _set_signal(0)


def _set_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL, number, 0, 0, 0)

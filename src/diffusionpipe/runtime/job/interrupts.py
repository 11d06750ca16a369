"""Ctrl-C, also where a library turns it into an error of its own.

Python raises KeyboardInterrupt wherever the main thread is. Code in C that asks an object for its length, such as
torch's while it reads a tensor from a file, may take that for "has no length" and raise a ValueError. So the process
remembers that it was interrupted, and whatever error ends it then is a consequence.
"""

import signal
from types import FrameType

_heard = False


def remember_interrupts() -> None:
    """Install a handler of SIGINT so that `was_interrupted` reports it; call it in the main thread.

    A handler that is not Python's own is left alone; then nothing is reported.
    """
    global _heard  # one process has one SIGINT
    _heard = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _remember)


def was_interrupted() -> bool:
    """Whether SIGINT has raised KeyboardInterrupt since `remember_interrupts`."""
    return _heard


def _remember(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)

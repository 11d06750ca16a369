"""Signals that tests send, heard by what they start."""

import signal


def hear_all_signals() -> None:
    """Start jobs that hear signals, even if this program was started by nohup or in the background of a script."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:  # what is ignored, programs that are started ignore too
            signal.signal(number, lambda *_: None)

"""A watchdog's place, how patient it is, and how its process ends."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from diffusionpipe.errors import PeerError
from diffusionpipe.units import Seconds

_BROKEN_CONNECTION = ("gloo/", "connection closed by peer", "connection reset", "broken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A watchdog's rank, the number of ranks, the holder of the store, and the times between beats and of silence."""

    rank: int
    world_size: int
    store_rank: int | None = None
    """The rank whose process holds the store; None: the launcher's does."""
    interval: Seconds = 1.0
    """The time between two beats."""
    patience: Seconds = 8.0
    """Silence after which a rank counts as gone: above any pause of a healthy rank, and 15 s with all delays."""


def end_process(message: str) -> None:
    """Write `message` to the standard error stream and end the process with status 1, in spite of other threads."""
    os.write(2, f"{message}\n".encode())  # sys.stderr's lock may be held by the blocked main thread
    os._exit(1)


@contextlib.contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, PeerError):
        return True
    from torch.distributed import DistError

    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _BROKEN_CONNECTION)

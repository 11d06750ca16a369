"""A function in a forked process with limits of time and memory, and how it ended.

The process has everything imported and starts in milliseconds. It may take `MEMORY` more than it starts with.
"""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import psutil

from diffusionpipe.errors import DiffusionPipeError

MEMORY = 2**30
PATIENCE = 20.0
"""Seconds of processor time; also seconds by the clock without any."""


class Ending(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    HANG = "hang"
    MEMORY = "memory"


@dataclass(frozen=True)
class Outcome:
    ending: Ending
    text: str
    """The refusal, or the traceback."""


class Isolated:
    """The running process."""

    def __init__(self, act: Callable[[], object], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._text, self._stack = folder / "said", folder / "stack"
        self._looked, self._spent = time.monotonic(), -1.0
        self.pid = os.fork()
        if self.pid == 0:
            _work(act, self._text, self._stack)

    def outcome(self) -> Outcome | None:
        """How it has ended; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            if not self._waits_for_long():
                return None
            os.kill(self.pid, signal.SIGABRT)  # faulthandler writes where it was
            time.sleep(0.1)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return Outcome(Ending.HANG, _read(self._stack))
        code = os.waitstatus_to_exitcode(status)
        match code:
            case 0:
                return Outcome(Ending.ACCEPTED, "")
            case 2:
                return Outcome(Ending.REFUSED, _read(self._text))
            case 3:
                return Outcome(Ending.MEMORY, _read(self._text))
            case _ if code == -signal.SIGXCPU:
                return Outcome(Ending.HANG, _read(self._stack))
            case _:
                return Outcome(Ending.TRACEBACK, _read(self._text) or f"exit status {code}\n{_read(self._stack)}")

    def _waits_for_long(self) -> bool:
        """Whether it has taken no processor time for long; on a busy machine one that works may take long, too."""
        now = time.monotonic()
        if now - self._looked > PATIENCE:
            spent = sum(psutil.Process(self.pid).cpu_times()[:2])
            if spent - self._spent < PATIENCE / 100:
                return True
            self._looked, self._spent = now, spent
        return False


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _work(act: Callable[[], object], text: Path, stack: Path) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        said = os.open(text, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream, target in ((0, null), (1, null), (2, said)):
            os.dup2(target, stream)
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        trace = stack.open("w")
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGXCPU, trace, chain=True)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        spent = int(time.process_time()) + int(PATIENCE) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent, spent + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _status_of(act)
        sys.stderr.flush()
    finally:
        os._exit(code)


def _status_of(act: Callable[[], object]) -> int:
    try:
        act()
    except DiffusionPipeError as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        is_memory = isinstance(error, MemoryError) or any(
            word in str(error) for word in ("allocate memory", "bad_alloc")
        )
        return 3 if is_memory else 1
    return 0


def all_outcomes(acts: Iterator[tuple[int, Callable[[], object]]], folder: Path, processes: int) -> Iterator[
    tuple[int, Outcome]
]:  # fmt: skip
    """(number, outcome) of each act, `processes` at a time, in the order in which they end."""
    running: dict[int, Isolated] = {}
    is_more = True
    while running or is_more:
        while is_more and len(running) < processes:
            number, act = next(acts, (-1, None))
            if act is None:
                is_more = False
            else:
                running[number] = Isolated(act, folder / f"case-{number}")
        for number, process in list(running.items()):
            if (outcome := process.outcome()) is not None:
                del running[number]
                yield number, outcome
        time.sleep(0.002)

"""Processes that run a script as `python -c` does, but start with torch and diffusers imported."""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from subprocess import TimeoutExpired
from threading import Thread
from typing import TextIO

from crew import start_fork_server


class Forked:
    """Such a process; its attributes are those of subprocess.Popen, its streams are text."""

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        out, err = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(script, dict(environment), out[1], err[1]))
        self._process.start()
        self.stdout, self.stderr = (_stream(*pipe) for pipe in (out, err))
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Ends it and closes its streams, unread: children of it may hold their other ends for longer."""
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(["forked"], timeout or 0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both streams, once the process has ended."""
        found: dict[str, str] = {}
        reading = Thread(target=lambda: found.update(err="" if self.stderr.closed else self.stderr.read()))
        reading.start()
        self.wait(timeout)
        out = "" if self.stdout.closed else self.stdout.read()
        reading.join()
        self.stdout.close()
        self.stderr.close()
        return out, found["err"]


def _stream(ours: Connection, theirs: Connection) -> TextIO:
    """What the process writes to a pipe."""
    theirs.close()  # so that the stream ends with the process
    with ours:
        return os.fdopen(os.dup(ours.fileno()), encoding="utf-8")


def _run(script: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})

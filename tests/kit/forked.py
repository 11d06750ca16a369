"""Processes that run a script or a program as `python` does, but start with torch and diffusers imported."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from threading import Thread
from typing import TextIO

from kit.crew import start_fork_server
from kit.nursery import found_nursery, run_program


class Forked:
    """Such a process; its attributes are those of subprocess.Popen, its streams are text."""

    def __init__(
        self,
        program: str | Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        is_merged: bool = False,
        beside: int | None = None,
    ) -> None:
        """`program`: a script, or the words after `python`, whose ranks are forked too (see nursery.py).

        `folder`: where it works; `is_merged`: its errors go to its output; `beside`: the process whose namespaces it
        enters.
        """
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        out, err = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run,
            args=(
                program,
                dict(environment),
                str(folder or Path.cwd()),
                beside,
                out[1],
                out[1] if is_merged else err[1],
            ),
        )
        self._process.start()
        self.stdout, self.stderr = (_stream(*pipe) for pipe in (out, err))
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

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
        """The rest of both streams, once the process and those that it has started have ended or closed them."""
        found: dict[str, str] = {}
        streams = {"out": self.stdout, "err": self.stderr}
        reading = [
            Thread(target=lambda name=name, stream=stream: found.update({name: stream.read()}))
            for name, stream in streams.items()
            if not stream.closed
        ]
        for one in reading:
            one.start()
        self.wait(timeout)
        for one in reading:
            one.join()
        for stream in streams.values():
            stream.close()
        return found.get("out", ""), found.get("err", "")


def _stream(ours: Connection, theirs: Connection) -> TextIO:
    """What the process writes to a pipe."""
    theirs.close()  # so that the stream ends with the process
    with ours:
        return os.fdopen(os.dup(ours.fileno()), encoding="utf-8")


def completed(
    words: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = 200, check: bool = True
) -> "CompletedProcess[str]":
    """`python WORDS` once it has ended, as subprocess.run returns it with its outputs as text.

    Raises:
        AssertionError: its status is not 0, where `check` asks for that.
    """
    process = Forked(words, environment if environment is not None else os.environ)
    try:
        out, error = process.communicate(timeout)
    finally:
        process.close()
    assert process.returncode is not None
    assert not check or process.returncode == 0, f"{list(words)} ended with {process.returncode}:\n{error}"
    return CompletedProcess(list(words), process.returncode, out, error)


def _run(
    program: str | Sequence[str],
    environment: dict[str, str],
    folder: str,
    beside: int | None,
    out: Connection,
    err: Connection,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what the fork server has said while it imported is no word of this program
    if beside is not None:
        _enter_namespaces(beside)
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    os.environ.clear()
    os.environ.update(environment)
    if isinstance(program, str):
        sys.argv = ["-c"]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        found_nursery()
        run_program(program)


def _enter_namespaces(pid: int) -> None:
    """Those of a process that tests/kit/nodes.py makes; this process has one thread."""
    library = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt", "net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as file:
            if library.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {file.name}")

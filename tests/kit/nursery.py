"""Programs of Python in processes that are forked with all imports done: a start takes a tenth of a second, not seven.

    fork server (tests/kit/crew.py: torch, diffusers and the trainer imported)
      └─ launcher         runs `diffusionpipe train ...` or torchrun; torch's agent in it starts, polls, ends the ranks
           ├─ nursery     has one thread, and forks the ranks; ends with the launcher
           ├─ rank 0      a child of the launcher, as always: the nursery's child is orphaned on purpose, and an orphan
           └─ rank 1      goes to the nearest ancestor that asks for it (PR_SET_CHILD_SUBREAPER)

Only the program's own start is left out; launcher, agent, ranks and their command lines are the real ones.
"""

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import TimeoutExpired
from typing import Any, NoReturn
from unittest import mock

from kit.crew import start_fork_server

_SUBREAPER = 36

_nursery: socket.socket | None = None
"""In the launcher: the way to the process that forks the ranks."""


def found_nursery(prepare: Callable[[], None] | None = None) -> None:
    """From now on ranks that torch's agent starts in this process, which has one thread, are forked.

    `prepare`: runs in each rank before its program.
    """
    global _nursery
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _tend(theirs, prepare)
    theirs.close()
    _nursery = ours
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    mock.patch.object(subprocess_handler, "Popen", NurseryPopen).start()


@contextmanager
def nursery_here() -> Iterator[None]:
    """The same while the block runs in a process that may have threads: the nursery is forked by the fork server.

    Its orphans come here too, as the fork server is a child of this process.
    """
    global _nursery
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    start_fork_server()
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("forkserver").Process(target=_tend, args=(theirs, None))
    process.start()
    theirs.close()
    library = ctypes.CDLL(None)
    library.prctl(_SUBREAPER, 1, 0, 0, 0)
    _nursery = ours
    try:
        with mock.patch.object(subprocess_handler, "Popen", NurseryPopen):
            yield
    finally:
        _nursery = None
        library.prctl(_SUBREAPER, 0, 0, 0, 0)
        ours.close()
        process.join()


class NurseryPopen:
    """What torch's agent needs of subprocess.Popen, for a rank that the nursery forks."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **_: object) -> None:
        self.returncode: int | None = None
        files = [stream.fileno() if stream is not None else fd for stream, fd in ((stdout, 1), (stderr, 2))]
        message = json.dumps({"arguments": list(args), "environment": dict(env), "folder": os.getcwd()}).encode()
        assert _nursery is not None
        socket.send_fds(_nursery, [len(message).to_bytes(8, "little")], files)
        _nursery.sendall(message)
        self.pid = int.from_bytes(_nursery.recv(8, socket.MSG_WAITALL), "little")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutExpired(["rank"], timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _tend(requests: socket.socket, prepare: Callable[[], None] | None) -> NoReturn:
    """The nursery's whole life: fork ranks until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # as the launcher does, which ends it
    try:
        while True:
            head, files, _, _ = socket.recv_fds(requests, 8, 2)
            if len(head) < 8:
                os._exit(0)
            length = int.from_bytes(head, "little")
            order = json.loads(requests.recv(length, socket.MSG_WAITALL))
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                parent = os.getpid()
                rank = os.fork()
                if rank == 0:
                    requests.close()
                    os.close(writer)
                    os.close(reader)
                    while os.getppid() == parent:
                        time.sleep(0.001)
                    _be_rank(order, files, prepare)
                os.write(writer, rank.to_bytes(8, "little"))
                os._exit(0)
            os.waitpid(between, 0)
            os.close(writer)
            pid = os.read(reader, 8)
            os.close(reader)
            for file in files:
                os.close(file)
            requests.sendall(pid)
    finally:
        os._exit(1)


def _be_rank(order: Mapping[str, Any], files: Sequence[int], prepare: Callable[[], None] | None) -> NoReturn:
    """A rank's whole life."""
    os.setsid()
    for file, target in zip(files, (1, 2), strict=True):
        os.dup2(file, target)
        os.close(file)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if prepare is not None:
        prepare()
    run_program(order["arguments"][1:])  # the first is the interpreter


def run_program(words: Sequence[str]) -> NoReturn:
    """`python WORDS` of a module, a file or a script after -c, ended as the interpreter ends a program."""
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    status = 1
    try:
        _execute([word for word in words if word != "-u"] if words[0] == "-u" else list(words))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


def _execute(words: list[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")

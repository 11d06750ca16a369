"""The command in processes that are forked with all imports done: a start takes a tenth of a second instead of seven.

    fork server (tests/crew.py: torch, diffusers and the trainer imported)
      └─ launcher         runs `diffusionpipe train ...`; torch's agent in it starts, polls and ends the ranks
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
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
from crew import start_fork_server
from jobs import Job
from moments import Moment

from diffusionpipe.trainer.recipe import Recipe

_SUBREAPER = 36


class ForkedCommand(Job):
    """`diffusionpipe train` with a recipe; a rank can be made to wait at a moment of its work."""

    def __init__(
        self, recipe: Recipe, *words: str, ranks: int = 2, moment: Moment | None = None, patches: str = ""
    ) -> None:
        """`patches`: a script that each rank runs before it starts; it sees its number as `rank`."""
        super().__init__(recipe, words, ranks)
        start_fork_server()
        wishes = {"moment": moment.to_json() if moment is not None else None, "patches": patches}
        (self.place / "wishes.json").write_text(json.dumps(wishes))
        (self.place / "err").touch()
        context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess = context.Process(target=_launch, args=(str(self.place), self.arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def rank_now(self, number: int) -> psutil.Process | None:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((self.place / f"rank-{number}.pid").read_text()))
            if os.readlink(f"/proc/{process.pid}/cwd") == str(self.place):
                return process
        return None


class NurseryPopen:
    """What torch's agent needs of subprocess.Popen, for a rank that the nursery forks."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **_: object) -> None:
        self.returncode: int | None = None
        files = [stream.fileno() if stream is not None else fd for stream, fd in ((stdout, 1), (stderr, 2))]
        message = json.dumps({"arguments": list(args), "environment": dict(env)}).encode()
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
        from subprocess import TimeoutExpired

        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutExpired(["rank"], timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_nursery: socket.socket | None = None
"""In the launcher: the way to the process that forks the ranks."""


def _launch(place: str, arguments: list[str]) -> NoReturn:
    """The launcher's whole life."""
    global _nursery
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.chdir(place)
    for stream, target in (("out", 1), ("err", 2)):
        file = os.open(stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, target)
        os.close(file)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _tend(theirs)
    theirs.close()
    _nursery = ours
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    mock.patch.object(subprocess_handler, "Popen", NurseryPopen).start()
    _run(arguments)


def _tend(requests: socket.socket) -> NoReturn:
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
                    _be_rank(order, files)
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


def _be_rank(order: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """A rank's whole life."""
    os.setsid()
    for file, target in zip(files, (1, 2), strict=True):
        os.dup2(file, target)
        os.close(file)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    rank = int(os.environ["RANK"])
    draft = Path(f".rank-{rank}.pid")
    draft.write_text(str(os.getpid()))
    draft.replace(f"rank-{rank}.pid")
    wishes = json.loads(Path("wishes.json").read_text())
    if wishes["patches"]:
        exec(compile(wishes["patches"], "<patches>", "exec"), {"rank": rank})
    if wishes["moment"] is not None:
        Moment.from_json(wishes["moment"]).arm(rank, Path.cwd())
    words = order["arguments"]
    _run(words[words.index("diffusionpipe") + 1 :])


def _run(arguments: Sequence[str]) -> NoReturn:
    """`diffusionpipe ARGUMENTS`, ended as the interpreter ends a program."""
    import torch

    from diffusionpipe.cli import main

    gc.freeze()
    torch.set_num_threads(1)
    sys.argv = ["diffusionpipe", *arguments]
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    status = 1
    try:
        main(list(arguments))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        os._exit(status)

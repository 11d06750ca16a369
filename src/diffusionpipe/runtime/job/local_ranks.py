"""Ranks as processes of this machine that stay: started once, then asked to run one function after the other.

Starting a process with torch takes seconds, an iteration of waits milliseconds; so the ranks are forked from one
process that has imported torch, and keep their process group between calls.

A rank ends with the process that started it, however that one ends: a thread of the rank waits for a pipe that the
system closes then. SIGKILL leaves no time to tidy up, and a rank in the middle of a call reads no other pipe.
"""

import multiprocessing
import os
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from diffusionpipe.errors import DiffusionPipeError, PeerError, ScheduleError

PRELOAD = ("diffusionpipe.runtime.rehearsals.rehearsal",)
"""The modules that the ranks import before they are forked."""


class _Step(int):
    """A number that a rank reports as its progress during a call; its class tells it from the call's result."""


class LocalRanks:
    """Processes of this machine that are the ranks of a job, seen from their parent; `run` calls a function on all."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = tuple(pipes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self._pipes)

    def run(
        self, function: Callable[..., Any], *arguments: Any, progress: Callable[[int], None] | None = None
    ) -> list[Any]:
        """Call `function(job, *arguments)` on every rank at once; returns the results by rank.

        The function must be importable by the ranks, arguments and results must be picklable. Values that a generator
        yields on rank 0 go to `progress`, and its return value is its result. After an error the ranks are of no use
        any more: some may still wait for the one that failed.

        Raises:
            DiffusionPipeError: one that a rank raised.
            PeerError: a rank died, or failed in another way; the text says which and holds its traceback.
        """
        # All are asked before any answer is read: a call may need all ranks at once.
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, arguments))
            except BrokenPipeError:
                raise PeerError(f"rank {rank} of {self.num_ranks} has ended") from None
        results: dict[int, Any] = {}
        while len(results) < self.num_ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            for ready in wait(list(waiting)):
                rank = next(rank for pipe, rank in waiting.items() if pipe is ready)
                result = self._receive(rank)
                if not isinstance(result, _Step):
                    results[rank] = result
                elif rank == 0 and progress is not None:
                    progress(int(result))
        return [results[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> Any:
        try:
            kind, text, result = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise PeerError(
                f"rank {rank} of {self.num_ranks} ended without an error message; it may have been killed"
            ) from None
        if kind is ScheduleError:
            raise ScheduleError(text.splitlines())
        if kind is not None:
            error: DiffusionPipeError = kind(text)
            raise error
        if text:
            raise PeerError(f"rank {rank} of {self.num_ranks} failed:\n{text}")
        return result


@contextmanager
def local_ranks(num_ranks: int, *, preload: Sequence[str] = PRELOAD) -> Iterator[LocalRanks]:
    """Start ranks as processes on the CPU, one thread each, joined by gloo; they are killed at the end of the block.

    `preload`: modules that are imported once, before the processes are forked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # The port is free when the block ends, and the store of rank 0 takes it. Another program could take it in between.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pairs = [context.Pipe() for _ in range(num_ranks)]
    token = secrets.token_hex(16)
    processes = [
        context.Process(target=_serve, args=(rank, num_ranks, port, token, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process, (_, theirs) in zip(processes, pairs, strict=True):
        process.start()
        # This process keeps no end of theirs, so `recv` ends with EOFError where a rank dies.
        theirs.close()
    try:
        yield LocalRanks([ours for ours, _ in pairs])
    finally:
        # All are killed before the first is waited for.
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _serve(rank: int, num_ranks: int, port: int, token: str, pipe: Connection) -> None:
    """Run one rank in this process, without end: call each function that the pipe sends, and send its result back."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from diffusionpipe.runtime.job.membership import Membership
    from diffusionpipe.runtime.job.process_group import joined

    torch.set_num_threads(1)
    member = Membership(rank=rank, world_size=num_ranks, local_rank=rank, address="127.0.0.1", port=port, token=token)
    with joined(member, device="cpu") as job:
        while True:
            # The pipe is a parent's own and reaches no other machine, so unpickling is safe here.
            function, arguments = pipe.recv()
            try:
                result = function(job, *arguments)
                if isinstance(result, Generator):
                    result = _reported(result, pipe)
                answer: tuple[type[DiffusionPipeError] | None, str, Any] = (None, "", result)
            except DiffusionPipeError as error:
                answer = (type(error), str(error), None)
            except Exception:
                answer = (None, traceback.format_exc(), None)
            pipe.send(answer)


def _reported(steps: Generator[int, None, Any], pipe: Connection) -> Any:
    """The return value of the generator, which is run to its end; the values that it yields are sent by the pipe."""
    while True:
        try:
            pipe.send((None, "", _Step(next(steps))))
        except StopIteration as end:
            return end.value


def _end_with_parent() -> None:
    """Wait until the process that started the ranks is gone, then end this process at any point of its work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # Not sys.exit: the main thread may be blocked in C++.
        os._exit(1)

"""Ranks that stay: processes of one gloo job that run one function after the other.

Starting a process with torch and diffusers takes seconds, a tiny training milliseconds; so ranks are forked from one
process that has imported both, and a test module starts its ranks once. What they run must be importable by them: a
function of a module in this folder.
"""

import faulthandler
import gc
import multiprocessing
import os
import socket
import stat
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

PATIENCE = 120.0
"""Seconds after which a function that does not return on all ranks counts as hung."""

IMPORTED = (
    "diffusers.models.transformers.dit_transformer_2d",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.pipelines.dit.pipeline_dit",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.schedulers",
    "transformers.models.clip.modeling_clip",
    "diffusionpipe.cli.text.run_text",
    "diffusionpipe.planner.unequal.cutting",
    "diffusionpipe.runtime.rehearsals.rehearsal",
    "diffusionpipe.trainer.course.run",
    "diffusionpipe.trainer.reporting.tensorboard",
    "diffusionpipe.viz.grid",
    "diffusionpipe.workflows.training.run_check",
    "diffusionpipe.workflows.training.run_report",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
)
"""All that a training imports, so that no rank does."""


class Crew:
    """The parent's side."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """`function(job, ...)` on every rank; the results, or the exceptions, by rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments, keywords))
        return [self._receive(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _receive(self, rank: int, pipe: Connection) -> Any:
        if not pipe.poll(PATIENCE):  # the reason is often the error of another one
            others = [(number, other.recv()) for number, other in enumerate(self._pipes) if other.poll(0)]
            raise AssertionError(f"rank {rank} hangs; what the others have returned: {others}")
        return pipe.recv()


def start_fork_server(*more: str) -> None:
    """Imports what ranks need, and `more`, in the process that they are forked from.

    Without effect if it runs already.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*more, *IMPORTED])
    with mock.patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="FATAL"):  # as the launcher does: no stack traces of c10d
        forkserver.ensure_running()


def fork_server_of_this_process() -> None:
    """Makes the fork server by forking this process, which then imports nothing twice; it must not have computed yet.

    As `ForkServer.ensure_running` of CPython 3.11, but for the fork in place of a new interpreter.
    """
    for name in IMPORTED:
        import_module(name)
    server = forkserver._forkserver  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux chooses a free address
        address = listener.getsockname()
        listener.listen()
        alive, alive_here = os.pipe()  # the server ends when all processes that hold the second end have closed it
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive_here)
                _forget_the_parent(kept=(listener.fileno(), alive))
                forkserver.main(listener.fileno(), alive, ())
            finally:
                os._exit(0)
        os.close(alive)
    vars(server).update(_forkserver_address=address, _forkserver_alive_fd=alive_here, _forkserver_pid=pid)


def _forget_the_parent(kept: Collection[int]) -> None:
    """What a new interpreter would not have: pytest's streams, pipes to other processes, files to remove at the end."""
    faulthandler.disable()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    tracker = resource_tracker.getfd()
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in (*kept, tracker) and _is_pipe(descriptor):
                os.dup2(nothing.fileno(), descriptor)


def _is_pipe(descriptor: int) -> bool:
    """Whether a descriptor is open and leads to another process."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # the folder of descriptors has been closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@contextmanager
def crew_of(size: int, *, is_forked: bool = False) -> Iterator[Crew]:
    """`size` ranks, for the length of the block; `is_forked`: of this process, which must be in a `nest`."""
    if not is_forked:
        start_fork_server()
    context = multiprocessing.get_context("fork") if is_forked else multiprocessing.get_context("forkserver")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pairs = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=_work, args=(rank, size, port, pair[1])) for rank, pair in enumerate(pairs)]
    for process, pair in zip(processes, pairs, strict=True):
        process.start()
        pair[1].close()  # so that a rank that dies is noticed
    try:
        yield Crew([pair[0] for pair in pairs])
    finally:
        for process in processes:
            process.kill()
            process.join()


def nest(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own, whose memory the ranks that it forks begin with.

    What many ranks would do at their start it does once, before it forks them. It must not compute: threads cannot be
    forked.
    """
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hatch, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _hatch(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except BaseException as error:
        error.add_note(traceback.format_exc())
        pipe.send(error)


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    """The ranks' side."""
    import torch

    from diffusionpipe.runtime.job.membership import Membership
    from diffusionpipe.runtime.job.process_group import joined

    gc.freeze()  # see conftest
    torch.set_num_threads(1)
    member = Membership(rank=rank, world_size=size, local_rank=rank, address="127.0.0.1", port=port)
    with joined(member, device="cpu") as job:
        while True:
            function, arguments, keywords = pipe.recv()
            try:
                result = function(job, *arguments, **keywords)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)

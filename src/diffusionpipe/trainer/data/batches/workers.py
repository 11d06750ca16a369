"""Processes that make a rank's batches ahead, and the memory in which a batch travels to the rank.

    rank    step 7 ──────────────────────────────────────>  data worker    makes the batch of step 7
            names, dtypes and shapes, one file descriptor <──              writes it into memory of its own

The memory is an anonymous file (memfd): the worker writes the batch into it once, and the rank maps it without a copy.
/dev/shm is not used, so its size does not matter (containers have 64 MB by default), and there are no semaphores that a
killed process could leave behind. A worker has one pipe to its rank. If the worker dies, the pipe ends, and the rank
notices at once. If the rank dies, the pipe ends too, and the worker ends.
"""

import faulthandler
import json
import mmap
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize

import torch
from torch import Tensor

from diffusionpipe.errors import DataError
from diffusionpipe.runtime.job.parent_death import end_with_parent
from diffusionpipe.runtime.weights.anonymous_file import anonymous_file
from diffusionpipe.units import Bytes, Seconds

PREFETCHED = 2
"""The number of batches that each worker keeps ready."""
POLITENESS = 10
"""The number that is added to the workers' nice value."""

MakeBatch = Callable[[int], Mapping[str, Tensor]]
"""A function `make(step)` that returns the batch of a step, tensors by name; it can be pickled."""

_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STACKS = signal.SIGUSR2
"""The signal at which a worker writes its stacks."""
_ALIGNED: Bytes = 64
_LAST_WORDS: Seconds = 5.0
"""The seconds to wait for the end of a worker that has closed its pipe or was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A data worker as the rank sees it: its process, pipe and file of stacks."""

    process: SpawnProcess
    pipe: Connection
    stacks: int
    """The descriptor of the file into which the worker writes its stacks when it gets `_STACKS`."""


class DataWorkers:
    """The processes that make one rank's batches ahead.

    The workers take turns: each makes every num_workers-th step, so batches come in order. Workers are spawned, not
    forked: the rank has threads of gloo or CUDA.
    """

    def __init__(self, make: MakeBatch, steps: range, num_workers: int) -> None:
        """Starts the workers and asks them for the first batches.

        `make`: the function that makes a batch. `steps`: the steps to make.

        Raises:
            DataError: a worker cannot be started.
        """
        self._steps, self._asked = steps, 0
        self._workers: list[_Worker] = []
        # At its exit multiprocessing sends daemons SIGTERM, which workers ignore, and waits for them. So they are
        # killed before that.
        self._finalizer = Finalize(self, _kill, args=(self._workers,), exitpriority=10)
        self.awaited: int | None = None
        """The process for which the rank waits now."""
        try:
            self._workers += [_started(make, number) for number in range(num_workers)]
        except OSError as error:
            self.close()
            raise DataError(f"a data worker cannot be started: {error}; set data.workers = 0") from error
        for _ in range(PREFETCHED * num_workers):
            self._ask()

    def take(self, step: int) -> dict[str, Tensor]:
        """The raw inputs of a step by name; waits until its worker has made them.

        Steps must be taken in order.

        Raises:
            DataError: the worker could not make the batch, or died; the message names the cause.
        """
        worker = self._worker_of(step)
        self.awaited = worker.process.pid
        try:
            batch = _received(worker.pipe)
        except (EOFError, OSError) as error:
            raise DataError(_death(worker.process, step)) from error
        finally:
            self.awaited = None
        self._ask()
        return batch

    def stacks(self, patience: Seconds = 1.0) -> str:
        """A text of the Python stacks of all workers now; it waits at most `patience` seconds for stuck workers."""
        workers = tuple(self._workers)
        before = [os.fstat(worker.stacks).st_size for worker in workers]
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid or 0, _STACKS)
        deadline = time.monotonic() + patience
        texts = []
        for worker, size in zip(workers, before, strict=True):
            while os.fstat(worker.stacks).st_size == size and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)  # until the last line is there
            written = os.pread(worker.stacks, 2**20, size).decode(errors="replace")
            texts.append(f"Data worker (process {worker.process.pid}):\n{written or '  no answer'}\n")
        return "".join(texts)

    def close(self) -> None:
        """Kills the worker processes, which hold nothing that must be kept."""
        self._finalizer()

    def _worker_of(self, step: int) -> _Worker:
        return self._workers[self._steps.index(step) % len(self._workers)]

    def _ask(self) -> None:
        """Asks the next worker for the next batch, if there is one more step."""
        if self._asked < len(self._steps):
            step = self._steps[self._asked]
            self._asked += 1
            with suppress(OSError):  # the worker has died; `take` says how
                self._worker_of(step).pipe.send_bytes(str(step).encode())


def _started(make: MakeBatch, number: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make, theirs), name=f"data worker {number}", daemon=True)
    with _signals_blocked():  # a new process inherits the blocked signals
        process.start()
    theirs.close()  # so that the pipe ends with the worker
    stacks = anonymous_file()
    with suppress(OSError):  # the worker has died already; `take` says how
        reduction.send_handle(ours, stacks, process.pid)
    return _Worker(process=process, pipe=ours, stacks=stacks)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A context that blocks signals, so that a process which starts in it gets none before it can ignore them."""
    resource_tracker.ensure_running()  # starting it later would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_LEFT_TO_THE_RANK, _STACKS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    # All are killed before the first one is awaited.
    for worker in workers:
        worker.process.join(_LAST_WORDS)  # one that waits for a dead file server does not end
        worker.pipe.close()
        os.close(worker.stacks)
    workers.clear()


def _death(process: SpawnProcess, step: int) -> str:
    """A sentence on how the worker ended that was to make the batch of `step`."""
    process.join(_LAST_WORDS)
    who = f"step {step}: the data worker (process {process.pid}), which decodes pictures,"
    code = process.exitcode
    if code is None:
        return f"{who} closed its connection"
    if code >= 0:
        return f"{who} ended with status {code}; its error is above or in the rank's log"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"{who} was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


# The worker's side.


def _serve(make: MakeBatch, pipe: Connection) -> None:
    """Makes the batches of the steps that the rank asks for, in a worker's process, until the pipe ends."""
    _leave_signals_to_the_rank()
    rank = multiprocessing.parent_process()
    if rank is not None and not end_with_parent(rank.pid or 0):  # the rank has died in the meantime
        os._exit(1)
    threading.Thread(target=_end_with_the_rank, name="end of the rank", daemon=True).start()
    os.nice(POLITENESS)  # batches are made ahead, so a worker can wait until a rank that shares its core does
    torch.set_num_threads(1)  # each worker takes one core
    with suppress(EOFError, OSError):
        faulthandler.register(_STACKS, file=reduction.recv_handle(pipe), all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (_STACKS,))
        while True:
            step = int(pipe.recv_bytes())
            _reply(pipe, step, make)


def _end_with_the_rank() -> None:
    """Waits for the end of the rank's process, and then ends the worker's process.

    A worker that is stuck would not see the end of its pipe.
    """
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def _leave_signals_to_the_rank() -> None:
    """Lets this worker ignore signals that ask its rank to stop.

    The rank may want a last checkpoint, for which it needs its batches; workers end when the rank does.
    """
    for number in _LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)


def _reply(pipe: Connection, step: int, make: MakeBatch) -> None:
    """Makes the batch of a step and sends it to the rank, or the reason why there is none."""
    file: int | None = None
    try:
        batch = make(step)
        specs = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in batch.items()]
        file = anonymous_file()
        _write(file, list(batch.values()))
    except DataError as error:
        reply: dict[str, object] = {"error": f"step {step}: {error}"}
    except Exception as error:
        traceback.print_exc()
        reply = {"error": f"step {step}: a data worker failed: {type(error).__name__}: {error}"}
    else:
        reply = {"tensors": specs}
    # The descriptor follows the reply, because a pipe carries both in order.
    pipe.send_bytes(json.dumps(reply).encode())
    if "tensors" in reply and file is not None:
        reduction.send_handle(pipe, file, os.getppid())
    if file is not None:
        os.close(file)


# The memory of a batch.


def _write(file: int, tensors: list[Tensor]) -> None:
    """Writes the tensors into the file, one after the other, each at a multiple of `_ALIGNED` bytes."""
    start = 0
    for tensor in tensors:
        if not tensor.numel():  # of a rank that encodes no rows: nothing to view as bytes
            continue
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        written = 0
        while written < len(data):
            written += os.pwrite(file, data[written:], start + written)  # may write a part only
        start = _aligned(start + len(data))


def _received(pipe: Connection) -> dict[str, Tensor]:
    """The next batch that a worker sends, tensors by name.

    Raises:
        DataError: the worker could not make it.
    """
    reply = json.loads(pipe.recv_bytes())
    if "error" in reply:
        raise DataError(reply["error"])
    file = reduction.recv_handle(pipe)
    try:
        size = os.fstat(file).st_size
        memory = mmap.mmap(file, size) if size else None  # an empty file cannot be mapped
    finally:
        os.close(file)
    batch: dict[str, Tensor] = {}
    start = 0
    for name, dtype_name, shape in reply["tensors"]:
        dtype, count = getattr(torch, dtype_name), prod(shape)
        if memory is None or count == 0:
            batch[name] = torch.empty(shape, dtype=dtype)
            continue
        # Keeps the mapping alive.
        batch[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(shape)
        start = _aligned(start + batch[name].nbytes)
    return batch


def _aligned(start: Bytes) -> Bytes:
    return -(-start // _ALIGNED) * _ALIGNED

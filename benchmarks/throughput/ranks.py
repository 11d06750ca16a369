"""Ranks as processes of this machine, for one measurement."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

PRELOAD = "benchmarks.throughput.preload"


def run_ranks(num_ranks: int, main: Callable[..., Any], *arguments: Any, preload: str = PRELOAD) -> list[Any]:
    """Results of `main(rank, *arguments)`, run once per rank in processes that gloo connects, one thread each.

    `preload` is a module that imports what the ranks need; the first call's is taken, later ones share its server.

    Raises RuntimeError with the traceback of the first rank that fails; the others are ended then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, store, num_ranks, rank, main, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            rank = next(rank for rank, pipe in enumerate(pipes) if pipe is ready)
            try:
                error, results[rank] = pipes[rank].recv()
            except EOFError:
                error = "it ended without a word"
            if error:
                raise RuntimeError(f"rank {rank} of {len(pipes)} failed: {error}")
    return [results[rank] for rank in range(len(pipes))]


def _run(
    pipe: Connection, store: str, num_ranks: int, rank: int, main: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        result = main(rank, *arguments)
        dist.barrier()
        pipe.send(("", result))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise

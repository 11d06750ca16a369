"""The check that all ranks write to one file system."""

import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.job.agreement import agree, rank_in, size_of, together
from diffusionpipe.units import Seconds


def check_shared_file_system(folder: Path, *, patience: Seconds = 10.0) -> None:
    """Check that every rank can write into the folder and sees the first rank's file there, and the first all others'.

    Every rank calls it at the start, instead of finding out at the first checkpoint. A network file system
    may show a new file late: a rank looks again for `patience` seconds.

    Raises:
        CheckpointError: on all ranks; it names the nodes that lack the folder or cannot write.
    """
    rank, size = rank_in(), size_of()
    # All ranks use the first one's token, so files of an earlier start do not count.
    run = agree(lambda: secrets.token_hex(8))[0]
    tokens = [folder / f".shared-{run}-{other}" for other in range(size)]
    try:
        together(lambda: _write_token(tokens[rank]))
        seen = agree(lambda: _wait_for(tokens if rank == 0 else tokens[:1], patience))
        nodes = agree(socket.gethostname)
        # Both directions are the same finding: rank r and rank 0 do not share the folder.
        lacking = sorted({r for r in range(size) if not seen[r][0] or not seen[0][r]})
        # A barrier: no rank removes its token while another still looks for it.
        together(lambda: None)
    finally:
        with suppress(OSError):  # where it could not be written it cannot be removed, and that error is on its way
            tokens[rank].unlink()
    if lacking:
        where = "; ".join(f"{node} (ranks {ranks})" for node, ranks in _ranks_of_nodes(lacking, nodes))
        raise CheckpointError(
            f"{folder.absolute()} is not the same folder for all ranks: {where} does not share it with rank 0 "
            f"on {nodes[0]}; put the run on a file system that all nodes mount"
        )


def _write_token(path: Path) -> None:
    """Write a file with its own name as its content, and the folders above it.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write into {path.parent} on {socket.gethostname()}: {error}") from error


def _wait_for(tokens: Iterable[Path], patience: Seconds) -> list[bool]:
    """For each file, whether it appears within `patience` seconds."""
    paths = list(tokens)
    deadline = time.monotonic() + patience
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        if paths[0].parent.is_dir():
            os.listdir(paths[0].parent)  # makes a network file system ask its server again
        time.sleep(0.05)
    return [path.exists() for path in paths]


def _ranks_of_nodes(ranks: list[int], nodes: list[str]) -> list[tuple[str, str]]:
    """(node, its ranks among `ranks` as text) for each node that has some; `nodes`: the node of every rank."""
    names = dict.fromkeys(nodes[rank] for rank in ranks)
    return [(name, ", ".join(str(rank) for rank in ranks if nodes[rank] == name)) for name in names]

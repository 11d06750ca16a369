"""What ranks of the tests of messages run; see `crew`."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffusionpipe.costs import Link
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.runtime.comm import exchange
from diffusionpipe.runtime.comm.exchange import (
    PLAIN,
    broadcast,
    collect,
    form_of,
    gather,
    gather_numbers,
    optional,
    rows_of,
)
from diffusionpipe.runtime.job.agreement import agree, from_first, together
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.checkpoints import checkpoint
from diffusionpipe.trainer.data.scan.dataset import Sample

FLOATS = (0.1, 1 / 3, 5e-324, math.pi * 1e99, -0.0, 2.0**53 + 2)


class Intruder:
    """Unpickling one makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def send_all(job: Job) -> dict[str, object]:
    """Values of each kind, as each rank gets them."""
    rank = job.membership.rank
    return {
        "floats": gather(FLOATS, form_of(tuple[float, ...])),
        "dataclass": gather(Link(rank / 3, 1e9), form_of(Link)),
        "names": gather(["café \udcff\x1b", rank], PLAIN),
        "first": broadcast(rank + 5, form_of(int)),
        "one": gather(3 if rank else None, optional(form_of(int))),
        "none": [*gather(None, PLAIN), broadcast(None, optional(form_of(int))), *agree(lambda: None)],
        "numbers": [one.tolist() for one in gather_numbers(torch.tensor(FLOATS, dtype=torch.float64) + rank)],
        "own": together(lambda: {rank}),
    }


def join_as_guest(job: Job, folder: Path, call: str) -> object:
    """Rank 0 exchanges as ever; rank 1 takes part with a pickle that runs code where it is read."""
    if job.membership.rank == 1:
        with suppress(Exception):  # what rank 0 has sent is no pickle
            dist.all_gather_object([None, None], Intruder(folder / "code"))
        return None
    if call == "save":
        return checkpoint.save(folder, 1, {"w": torch.zeros(1)}, {}, keep=1)
    return agree(lambda: 1)


def send_much(job: Job) -> None:
    """More than a message may have, from rank 1."""
    exchange.MOST_GATHERED = 100
    try:
        gather("x" * (200 * job.membership.rank), form_of(str))
    finally:
        exchange.MOST_GATHERED = 2**28


def send_another_kind(job: Job) -> None:
    """A text where the others send numbers."""
    if job.membership.rank == 1:
        gather("code", form_of(str))
    else:
        gather(1, form_of(int))


def send_nothing(job: Job) -> None:
    """Nothing from rank 1, where the others send numbers."""
    gather(None if job.membership.rank else 1, optional(form_of(int)) if job.membership.rank else form_of(int))


def send_unwritable(job: Job, call: str) -> list[object]:
    """The error of an exchange in which one rank's value cannot travel, and what the next exchange gives."""
    is_wrong = job.membership.rank == (0 if call in ("broadcast", "from_first") else 1)
    value: Any = Path("x") if is_wrong else 1
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: gather(value, PLAIN),
        "agree": lambda: agree(lambda: value),
        "collect": lambda: collect(value, form_of(int) if not is_wrong else PLAIN),
        "broadcast": lambda: broadcast(value, PLAIN),
        "from_first": lambda: from_first(lambda: value),
    }
    problem = ""
    try:
        calls[call]()
    except TypeError as error:
        problem = str(error)
    return [problem, *gather(job.membership.rank, form_of(int))]


def collect_rows(job: Job) -> list[object]:
    """What the first rank reads of both, where the other sends rows of another kind in a second try."""
    rank = job.membership.rank
    rows = (Sample(name=f"{rank}.png", label=rank), Sample(name="b.png", text="b"))
    good = [read() for read in collect(rows, rows_of(Sample))]
    with suppress(ConfigError):
        bad = collect("code" if rank else 3, form_of(str) if rank else form_of(int))  # type: ignore[arg-type]
        return [*good, *(read() for read in bad)]
    return [*good, "refused"]


def fail_on_first(job: Job) -> None:
    def make() -> int:
        raise DataError("no pictures")

    from_first(make)

"""Which device each rank of a job computes on, agreed by all ranks before any of them opens NCCL.

    torchrun, a node with 2 GPUs        Slurm, --gpus-per-task=1           a node with 2 GPUs, 4 ranks
    rank  sees   device                 rank  sees   device                rank  sees   device
    0     0, 1   cuda:0                 0     A      cuda:0 (A)            0     0, 1   cuda:0
    1     0, 1   cuda:1                 1     B      cuda:0 (B)            1     0, 1   cuda:1
                                                                           2     0, 1   missing
                                                                           3     0, 1   missing

A rank that sees one device takes it, as the tasks of Slurm and the pods of Kubernetes do. A rank that sees several
takes the one of its local rank. Ranks on CPUs would wait for ranks on GPUs for ever at the start: such a job
is refused on all ranks alike, with this table.
"""

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]  # no stub has it

AUTO = "auto"
_SHOWN = 16
"""The most rows of the table in an error."""
_HEARD: Seconds = 5.0
"""How long a rank waits until all ranks have read why they are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice:
    """The devices of its machine that one rank sees: host, number of CUDA devices, and the one that it would take."""

    host: str
    local_rank: int
    asked: str
    """The kind of device that was asked for: "auto", "cpu" or "cuda"."""
    num_devices: int = 0
    """The number of visible CUDA devices."""
    uuid: str = ""
    """UUID of the device that the rank would take; "" where there is none, or torch does not have it."""
    host_id: str = ""
    """NCCL_HOSTID: ranks with different ones may share a device, because NCCL then takes them for two machines."""

    @property
    def index(self) -> int | None:
        """The number of the CUDA device that this rank would take, of those it sees; None: there is none for it."""
        # The scheduler has chosen for this rank; its local rank counts devices that it does not see.
        if self.num_devices == 1:
            return 0
        return self.local_rank if self.local_rank < self.num_devices else None


def sight(asked: str, local_rank: int) -> VisibleDevice:
    """The devices that this process sees; the CUDA device that it would take becomes its current one.

    `asked`: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: `asked` is another kind of device.
    """
    import torch

    if asked not in (AUTO, "cpu", "cuda"):
        raise ConfigError(f"there is no device {asked!r}; choose auto, cpu or cuda.")
    plain = VisibleDevice(
        host=socket.gethostname(),
        local_rank=local_rank,
        asked=asked,
        num_devices=0 if asked == "cpu" else torch.cuda.device_count(),
        host_id=os.environ.get("NCCL_HOSTID", ""),
    )
    if plain.index is None:
        return plain
    # Work that names no device would otherwise go to device 0 on every rank of the machine.
    torch.cuda.set_device(plain.index)
    uuid = getattr(torch.cuda.get_device_properties(plain.index), "uuid", "")
    return VisibleDevice(**asdict(plain) | {"uuid": str(uuid)})


def agreed_device(store: "Store", rank: int, world_size: int, own: VisibleDevice) -> "torch.device":
    """The torch device of this rank, after all ranks have exchanged what they see. Every rank calls it.

    Args:
        store: the job's store; all ranks are there.
        rank: this rank.
        world_size: the number of ranks.
        own: this rank's devices, from `sight`.

    Raises:
        ConfigError: on every rank alike: some ranks have no device, or share one, or ask for different kinds.
    """
    import torch

    store.set(f"device/{rank}", json.dumps(asdict(own)))
    seen = [VisibleDevice(**json.loads(store.get(f"device/{other}"))) for other in range(world_size)]
    store.add("device/heard", 1)
    try:
        index = device_indices(seen)[rank]
    except ConfigError:
        deadline = time.monotonic() + _HEARD  # one of the ranks may hold the store
        while store.add("device/heard", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.02)
        raise
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def device_indices(seen: Sequence[VisibleDevice]) -> tuple[int | None, ...]:
    """The number of each rank's CUDA device on its machine; None for all, where all compute on CPUs.

    Raises:
        ConfigError: some ranks have no device, or share one, or ask for different kinds.
    """
    kinds = {one.asked for one in seen}
    # "auto" becomes the CPU only where no rank of the job has a GPU.
    if kinds == {"cpu"} or (kinds == {AUTO} and not any(one.num_devices for one in seen)):
        return (None,) * len(seen)
    problems = []
    if "cpu" in kinds:
        on_cpu = [rank for rank, one in enumerate(seen) if one.asked == "cpu"]
        problems.append(f"{_ranks(on_cpu)} asked for the CPU and the others did not: give all of them one --device")
    missing = [rank for rank, one in enumerate(seen) if one.asked != "cpu" and one.index is None]
    if missing and not any(one.num_devices for one in seen):
        problems.append("no rank finds a CUDA device: check the driver and CUDA_VISIBLE_DEVICES, or use --device cpu")
    elif missing:
        problems.append(
            f"{_ranks(missing)} found no CUDA device: start at most one rank per device, give every task a "
            "device of its own, or use --device cpu"
        )
    sharing = defaultdict(list)
    for rank, one in enumerate(seen):
        if one.index is not None and one.uuid:
            # Indices say nothing here: tasks with one visible device all have index 0.
            sharing[one.host, one.host_id, one.uuid].append(rank)
    problems += [
        f"{_ranks(ranks)} would share one CUDA device: start at most one rank per device"
        for ranks in sharing.values()
        if len(ranks) > 1
    ]
    if problems:
        error = ConfigError("\n".join(["; ".join(problems) + ".", *_table(seen)]))
        error.is_common = True
        raise error
    return tuple(one.index for one in seen)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    return f"ranks {', '.join(shown)}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _table(seen: Sequence[VisibleDevice]) -> list[str]:
    heads = ("rank", "host", "local rank", "asked for", "CUDA devices", "device")
    rows = [
        (
            str(rank),
            one.host,
            str(one.local_rank),
            one.asked,
            str(one.num_devices) if one.asked != "cpu" else "",
            "cpu" if one.asked == "cpu" else "missing" if one.index is None else f"cuda:{one.index} {one.uuid}".strip(),
        )
        for rank, one in enumerate(seen[:_SHOWN])
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    more = [f"and {len(seen) - _SHOWN} more ranks"] if len(seen) > _SHOWN else []
    return [f"  {line.rstrip()}" for line in lines + more]

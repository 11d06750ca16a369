"""One rank's view of its machine, for `diffusionpipe doctor`."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.runtime.job.interfaces import GLOO, NAMED_INTERFACES, gloo_address
from diffusionpipe.runtime.job.loopback import is_loopback
from diffusionpipe.runtime.machine.free_memory import free_memory
from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.devices import VisibleDevice

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about one rank's machine on which a job depends: network, versions, device, memory, disk."""

    host: str
    addresses: tuple[str, ...]
    """The addresses to which the host's own name resolves."""
    listens: str
    """The address at which gloo awaits the other ranks; "" where the named interface has none."""
    interfaces: tuple[str, ...]
    """The names of the machine's network interfaces."""
    named: tuple[tuple[str, str], ...]
    """The variables of NAMED_INTERFACES that are set, with their values."""
    versions: tuple[tuple[str, str], ...]
    """(name, version) of the software whose versions must be equal on all ranks."""
    optimizers: tuple[tuple[str, str], ...] = ()
    """(package, version) of the installed packages of optimizers beside torch.optim."""
    asked: str = "auto"
    """The kind of device that the user asks for: "auto", "cpu" or "cuda"."""
    device: str
    device_id: str = ""
    """The UUID of a GPU."""
    host_id: str = ""
    """NCCL_HOSTID: ranks with different ones may share a GPU."""
    device_free: Bytes = 0
    """Free memory of a GPU in bytes; 0 on a CPU."""
    shared_memory: Bytes
    """Size of /dev/shm in bytes; 0 where there is none."""
    host_memory: Bytes
    """Host memory that programs may still use, in bytes; 0 where the system does not say."""
    disk: Bytes
    """Free bytes on the disk of the run folder."""
    open_files: int
    """The number of files that the process may have open."""


def facts_of(own: VisibleDevice, folder: Path, environ: Mapping[str, str]) -> Facts:
    """The facts about this process, its machine, and the device on which it would compute.

    `folder`: the run folder, on whose disk the free bytes are counted.
    """
    import resource

    host = socket.gethostname()
    is_gpu = own.index is not None
    found = Facts(
        host=host,
        addresses=_addresses(host),
        listens=gloo_address(environ.get(GLOO, ""), host),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        named=tuple((name, environ[name]) for name in NAMED_INTERFACES if environ.get(name)),
        versions=_versions(is_gpu=is_gpu),
        optimizers=tuple(_optimizers()),
        asked=own.asked,
        device="cpu",
        host_id=own.host_id,
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0,
        host_memory=free_memory() or 0,
        disk=shutil.disk_usage(folder).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    if not is_gpu:
        return found
    import torch

    properties = torch.cuda.get_device_properties(own.index)
    return replace(
        found,
        device=properties.name,
        device_id=str(getattr(properties, "uuid", "")),
        device_free=torch.cuda.mem_get_info(own.index)[0],
    )


def without_names(facts: Sequence[Facts]) -> tuple[Facts, ...]:
    """The facts of all ranks, with numbers for the names of hosts, devices and interfaces, and without addresses."""
    # Numbered in the order of ranks, so that equal hosts stay recognisable without their names.
    hosts = {host: f"host-{number}" for number, host in enumerate(dict.fromkeys(one.host for one in facts))}
    devices = dict.fromkeys((one.host, one.device_id) for one in facts)
    numbers = {device: f"gpu-{number}" if device[1] else "" for number, device in enumerate(devices)}
    return tuple(
        replace(
            one,
            host=hosts[one.host],
            addresses=tuple(map(_kind_of_address, one.addresses)),
            listens=_kind_of_address(one.listens),
            interfaces=tuple(f"interface-{number}" for number, _ in enumerate(one.interfaces)),
            named=tuple((name, _renamed(value, one.interfaces)) for name, value in one.named),
            device_id=numbers[one.host, one.device_id],
            host_id="set" if one.host_id else "",
        )
        for one in facts
    )


def _renamed(value: str, interfaces: Sequence[str]) -> str:
    mark, name = ("=", value[1:]) if value.startswith("=") else ("", value)
    return f"{mark}interface-{interfaces.index(name)}" if name in interfaces else f"{mark}other"


def _kind_of_address(address: str) -> str:
    return "network" if address and not is_loopback(address) else address


def _addresses(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _optimizers() -> Iterator[tuple[str, str]]:
    from diffusionpipe.trainer.optim.classes import EXTRA

    for package in EXTRA:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _versions(*, is_gpu: bool) -> tuple[tuple[str, str], ...]:
    import torch

    from diffusionpipe.version import __version__

    found = {"diffusionpipe": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if is_gpu:
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    return tuple(found.items())

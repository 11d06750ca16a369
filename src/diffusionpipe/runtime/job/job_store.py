"""The job's key-value store: where its ranks meet before anything else, and how they reach it."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no stub has them

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime.job.admission import private_keys
from diffusionpipe.runtime.job.loopback import is_loopback, loopback_listener
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.units import Seconds

_TRIAL: Seconds = 5.0
"""Seconds without a connection to its launcher's store after which a rank looks whether the launcher lives."""


def store_of(member: Membership, arrival: Seconds, patience: Seconds) -> tuple[Store, Callable[[], Store]]:
    """The job's key-value store and a function that opens the watchdog's own connection to it.

    `arrival`: how long to try to reach the store. `patience`: the same for the watchdog's connection.

    Raises:
        ConfigError: the port is in use, or the store cannot be reached.
        PeerError: the launcher of this rank has ended.
    """
    if member.world_size == 1 and not member.address:
        alone = HashStore()
        return alone, lambda: alone
    prefix = f"diffusionpipe/{member.attempt}"

    def connection(*, is_holder: bool, timeout: Seconds) -> Store:
        deadline = time.monotonic() + timeout
        while True:
            # The launcher holds the store: if it is gone, no attempt can succeed.
            if member.is_launched and os.getppid() != member.launcher:
                raise PeerError(f"the launcher (process {member.launcher}) has ended; this rank stops too")
            started = time.monotonic()
            trial = min(deadline - started, _TRIAL) if member.is_launched else deadline - started
            try:
                # Waiting for the others here would end without saying who is missing: `admit` says it.
                limit = timedelta(seconds=trial)
                store = tcp_store(member.address, member.port, is_holder=is_holder, timeout=limit)
            except (dist.DistNetworkError, OSError) as error:
                has_waited = time.monotonic() - started > trial / 2  # else it failed: a port in use, an unknown host
                if has_waited and not is_holder and time.monotonic() < deadline:
                    continue
                raise ConfigError(_network_problem(member, str(error).splitlines()[0])) from error
            store.set_timeout(timedelta(seconds=timeout))
            return PrefixStore(prefix, store)

    def connect() -> Store:
        return PrefixStore("watchdog", private_keys(connection(is_holder=False, timeout=patience), member.token))

    return connection(is_holder=member.rank == member.store_rank, timeout=arrival), connect


def tcp_store(address: str, port: int, *, is_holder: bool, timeout: timedelta, multi_tenant: bool = False) -> TCPStore:
    """A connection to the TCP key-value store at the address; with `is_holder` this process also runs the store.

    The holder of a store at a loopback address listens there alone; port 0: any free one.

    Raises:
        OSError: the holder's port at a loopback address is in use.
        DistNetworkError: the holder's port at another address is in use, or the store cannot be reached in time.
    """
    descriptor = None
    if is_holder and is_loopback(address):
        with loopback_listener(address, port) as listener:
            port, descriptor = listener.getsockname()[1], listener.detach()  # the store closes it
    return TCPStore(
        address,
        port,
        None,
        is_holder,
        timeout,
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=descriptor,
    )


def _network_problem(member: Membership, error: str) -> str:
    where = f"{member.address}:{member.port}"
    if "EADDRINUSE" in error or "address already in use" in error.lower():
        return f"port {member.port} on {member.address} is in use; choose another with torchrun's --master-port."
    return (
        f"rank {member.rank} on {socket.gethostname()} cannot reach the master at {where} ({error}); check "
        "MASTER_ADDR and MASTER_PORT, that rank 0 runs, and that no firewall blocks the connection."
    )

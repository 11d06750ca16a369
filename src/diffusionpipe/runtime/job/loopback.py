"""Jobs of one machine listen on its loopback interface alone: no other machine can connect to them.

A job is one of this machine if its master address is a loopback address. Then the store is given a socket that is bound
to that address, where it would otherwise listen on all addresses; gloo and NCCL, which listen on the address of the
host's name or of its network card, are told the loopback interface. Addresses of other machines and names of hosts
change nothing: ranks on several nodes must reach each other.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_INTERFACES = ("lo", "lo0")
"""Names of the loopback interface: on Linux, on macOS."""
_CHOICES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""Environment variable that names the interface on which a library listens -> the mark before a whole name in it."""


def is_loopback(address: str) -> bool:
    """Whether the address is "localhost" or a loopback IP address; False for other names."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_listener(address: str, port: int | None) -> socket.socket:
    """A socket that listens on the loopback address and the port; None: any free one.

    Raises:
        OSError: the port is in use or cannot be used.
    """
    address = "127.0.0.1" if address == "localhost" else address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port or 0), family=family, backlog=512)
    except OverflowError:
        raise OSError(errno.EINVAL, f"{port} is not a port; ports are 1 to 65535") from None


@contextmanager
def kept_local(address: str) -> Iterator[None]:
    """Within the block, process groups of a job at a loopback address listen on the loopback interface.

    Without effect for other addresses, and on variables that the user has set.
    """
    there = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in _INTERFACES if name in there), None)
    added: dict[str, str] = {}
    if interface is not None and is_loopback(address):
        # NCCL takes a name as a beginning unless it is marked with "=".
        added = {name: mark + interface for name, mark in _CHOICES.items() if name not in os.environ}
    os.environ.update(added)  # the libraries read nothing else
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)

"""The network interfaces that the environment names for gloo and NCCL: looked up before either would fail on them.

gloo ends half a minute later with a text that names no variable; so a job looks first.
"""

import errno
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from diffusionpipe.errors import ConfigError

GLOO = "GLOO_SOCKET_IFNAME"
NAMED_INTERFACES = (GLOO, "NCCL_SOCKET_IFNAME")
"""Variables that name the interfaces on which a library listens."""


def check_interfaces(environ: Mapping[str, str], variables: Sequence[str] = NAMED_INTERFACES) -> None:
    """Check that the network interfaces which the environment names for gloo and NCCL exist on this machine.

    Raises:
        ConfigError: one of the `variables` names no interface of this machine.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in variables:
        if unknown := unknown_interface(variable, environ.get(variable, ""), known):
            raise ConfigError(
                f"{variable}={environ[variable]} names no interface of this machine: {unknown}; choose one that "
                "`ip address` shows, or unset the variable"
            )


def unknown_interface(variable: str, value: str, interfaces: Sequence[str]) -> str | None:
    """A text "no NAMES among INTERFACES" if the variable's value names no interface that exists; None if one does.

    None also for an empty value and one that begins with "^" (all but these). Beginnings of names count for NCCL,
    unless the value begins with "=".
    """
    if not value or value.startswith("^"):
        return None
    is_prefix = variable.startswith("NCCL") and not value.startswith("=")
    names = value.removeprefix("=").split(",")
    # NCCL takes a name as a beginning, gloo as a whole.
    missing = [n for n in names if not any(i == n or (is_prefix and i.startswith(n)) for i in interfaces)]
    return f"no {', '.join(missing)} among {', '.join(interfaces)}" if len(missing) == len(names) else None


def gloo_address(value: str, host: str) -> str:
    """The IP address at which gloo listens on this machine; "" where the interface has none, "unknown" if not shown.

    With `value`, GLOO_SOCKET_IFNAME, the address of the first interface that it names. Else the first to which the name
    of the host resolves and which is one of this machine; if there is none, gloo takes the loopback address.
    """
    if value:
        return _address_of(value.split(",")[0])
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                # Only an address of this machine can be bound.
                trial.bind((address[0], 0, *address[2:]))
            except OSError:  # of another machine, or of none
                continue
            return str(address[0])
    return "127.0.0.1"


_SIOCGIFADDR = 0x8915
"""The request for an interface's address, see netdevice(7)."""


def _address_of(interface: str) -> str:
    """The address of an interface, IPv4 if it has one; "" if it has none, "unknown" where the system does not say."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            # A struct ifreq: 16 bytes for the name with its final zero, then a sockaddr, whose IPv4 address is bytes 20
            # to 23.
            found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            return _sixth_version(interface) if error.errno == errno.EADDRNOTAVAIL else "unknown"
    return socket.inet_ntoa(found[20:24])


def _sixth_version(interface: str) -> str:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":  # it is valid in the whole network
                return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return ""

"""The network interfaces that the environment names for gloo and NCCL: looked up before either would fail on them.

gloo ends half a minute later with a text that names no variable; so a job looks first.
"""

import socket
from collections.abc import Mapping, Sequence

from diffusionpipe.errors import ConfigError

GLOO = "GLOO_SOCKET_IFNAME"
NAMED_INTERFACES = (GLOO, "NCCL_SOCKET_IFNAME")
"""Variables that name the interfaces on which a library listens."""


def check_interfaces(environ: Mapping[str, str], variables: Sequence[str] = NAMED_INTERFACES) -> None:
    """Refuse what gloo or NCCL cannot start with.

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
    """The names of the value that no interface has; None where one has. NCCL takes beginnings of names.

    NCCL reads "=" as whole names, and "^" as all but these.
    """
    if not value or value.startswith("^"):
        return None
    is_prefix = variable.startswith("NCCL") and not value.startswith("=")
    names = value.removeprefix("=").split(",")
    missing = [n for n in names if not any(i == n or (is_prefix and i.startswith(n)) for i in interfaces)]
    return f"no {', '.join(missing)} among {', '.join(interfaces)}" if len(missing) == len(names) else None

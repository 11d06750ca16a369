"""Options that name the cards of one machine in place of a cluster's name."""

from __future__ import annotations

from typing import Annotated

import typer

Devices = Annotated[
    str | None,
    typer.Option(
        metavar="CARDS",
        help="The cards of one machine in place of a cluster's name, e.g. '2 x rtx4090 + 1 x rtx3090'; "
        "`diffusionpipe cluster --list` names all.",
        show_default=False,
    ),
]
LinkName = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="With --devices: the link between the cards, e.g. pcie4 or nvlink3; default: the slowest usual one.",
        show_default=False,
    ),
]


def cluster_named(name: str | None, devices: str | None, link: str | None, *, other: str) -> str | None:
    """The name of the cluster that the options state, None for none; cards and link become "CARDS@LINK".

    `other`: the option or argument that names a cluster directly, for messages.

    Raises:
        ConfigError: two of them name a cluster, or there is a link without cards.
    """
    from diffusionpipe.errors import ConfigError

    if devices is None:
        if link is not None:
            raise ConfigError(f"--link {link}: only --devices takes it; give the cards, or leave it out")
        return name
    if name is not None:
        raise ConfigError(f"--devices and {other} are both given; give the one that names the cluster")
    return f"{devices}@{link}" if link else devices

"""Links of one machine's devices by their usual names, and the network between such machines.

A link through the host's memory (GeForce cards on PCIe) is shared: more than two devices that send at once are slower.
"""

from dataclasses import dataclass

from diffusionpipe.costs.actions import Link
from diffusionpipe.costs.cluster import AllReduce, Cluster, Device

MOST_DEVICES = 8
"""The most devices of one machine."""
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """The figures of a kind of link and of the network beside it; bandwidths in GB/s, latencies in microseconds."""

    messages: tuple[float, float]
    """Bandwidth of messages between two devices: in a machine with two devices, and in one with more."""
    sums: tuple[float, float]
    """Bandwidth of sums over the devices: in a machine with two devices, and in one with more."""
    latencies: tuple[float, float]
    """Latency of messages, and of sums, inside a machine."""
    network: float
    """Bandwidth of the messages of a whole machine to others."""
    network_sums: float
    """Bandwidth of sums over the devices of several machines."""
    network_latencies: tuple[float, float]
    """Latency of messages, and of sums, between machines."""
    host: float
    """The bandwidth from host memory to a device, all devices copying at once."""


def _geforce(messages: tuple[float, float], sums: tuple[float, float], host: float) -> LinkKind:
    """The kind of link of GeForce cards with these bandwidths in GB/s, in a machine with a network of 10 Gb/s."""
    return LinkKind(
        messages=messages, sums=sums, latencies=(25, 50), network=1.1, network_sums=1.1, network_latencies=(60, 200),
        host=host,
    )  # fmt: skip


def _server(rate: float, *, latencies: tuple[float, float], host: float, network: float = 42.4) -> LinkKind:
    """The kind of link of devices with NVLink of `rate` GB/s, all of which send over one network of `network` GB/s.

    `latencies`: in microseconds, of messages and of sums inside a node. `host`: GB/s from host memory. The default of
    `network` is the rate that a network of 400 Gb/s reaches.
    """
    return LinkKind(
        messages=(rate, rate), sums=(rate, rate), latencies=latencies, network=network, network_sums=40,
        network_latencies=(30, 100), host=host,
    )  # fmt: skip


LINKS = {
    "pcie3": _geforce((6, 5), (5, 3.5), 6),
    "pcie4": _geforce((12, 10), (10, 7), 12),
    "pcie5": _geforce((24, 20), (20, 14), 24),
    "pcie4-direct": LinkKind(
        messages=(20, 20), sums=(14, 14), latencies=(20, 60), network=10.4, network_sums=10,
        network_latencies=(40, 150), host=12,
    ),
    "nvlink2": _server(120, latencies=(20, 50), host=6, network=10.4),
    "nvlink3": _server(230, latencies=(15, 40), host=12),
    "nvlink4": LinkKind(
        messages=(370, 370), sums=(400, 400), latencies=(12, 35), network=336, network_sums=340,
        network_latencies=(25, 80), host=25,
    ),
    "nvlink5": LinkKind(
        messages=(720, 720), sums=(760, 760), latencies=(12, 35), network=336, network_sums=340,
        network_latencies=(25, 80), host=50,
    ),
}  # fmt: skip
"""The kinds of links, by name: PCI Express through the host's memory, from device to device ("direct"), and NVLink by
generation."""


def linked(name: str, devices: tuple[tuple[Device, int], ...], link: str) -> Cluster:
    """The cluster of one machine with these devices, which a link of this kind joins.

    `devices`: pairs of a kind of device and the number of such devices. `link`: a key of `LINKS`.
    """
    kind = LINKS[link]
    found = tuple(device for device, count in devices for _ in range(count))
    is_many = len(found) > 2
    return Cluster(
        name=name,
        devices=found,
        nodes=(0,) * len(found),
        # True is the index 1: more than two share the link.
        intra=Link(latency=kind.latencies[0] / 1e6, bandwidth=kind.messages[is_many] * GB),
        # All ranks of the machine send at once.
        inter=Link(latency=kind.network_latencies[0] / 1e6, bandwidth=kind.network / len(found) * GB),
        intra_reduce=AllReduce(latency=kind.latencies[1] / 1e6, bandwidth=kind.sums[is_many] * GB),
        inter_reduce=AllReduce(latency=kind.network_latencies[1] / 1e6, bandwidth=kind.network_sums * GB),
    )

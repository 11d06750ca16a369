"""Clusters that come with DiffusionPipe, one file for one node (or one machine) each.

How they are called:

    a100-80x8      one node of 8 A100
    a100-80x8:4    four such nodes, joined as the file's `inter` and `inter_reduce` say
    rtx3090x4      1 to 8 of any known card (`costs.devices`) in one machine, with the card's usual link
    rtx4090x2+rtx3090x1@pcie4    cards of several kinds, and the link (`links.LINKS`) that joins them

Bandwidths are the part of the links that NCCL reaches: four fifths of NVLink and of the network, PCIe 4 through the
host's memory on GeForce cards. The A100 nodes share 400 Gb/s between all 8 ranks, the H100 and H200 nodes have it for
each. Messages count all ranks of a node sending at once; a sum over whole nodes has the whole node's network. Host
memory is read at half of what a device's PCIe lanes can do, because all devices read at once. These are assumptions;
"diffusionpipe cluster --ranks N" measures. Memory is the rest after torch's own use.
"""

import os
import re
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from diffusionpipe.costs.cluster import Cluster, Device, repeated
from diffusionpipe.costs.clusters.links import LINKS, MOST_DEVICES, linked
from diffusionpipe.costs.devices import DEVICES, DeviceRates
from diffusionpipe.costs.files import ANY_CPU, CLUSTER, cluster_from_text
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_file

MAX_NODES = 1024
OF_PRODUCTS = 0.75
"""The part of a step's time that depends on the peak rate of matrix products; the rest depends on the bandwidth."""
_NAMED = re.compile(r"(?P<card>.+)x(?P<count>\d{1,4})")
_CPU = re.compile(r", \d+ threads?$")  # as `profiler.measured.device_name` calls one
_COUNTED = re.compile(r"(?P<count>\d{1,4}) *x +(?P<card>.+)")


def shipped_clusters() -> tuple[str, ...]:
    """The names of all shipped clusters, in alphabetical order."""
    return tuple(sorted(Path(entry.name).stem for entry in files(__package__).iterdir() if entry.name.endswith("json")))


def load_cluster(name: str) -> Cluster:
    """The cluster that `name` means: a file, a shipped cluster, or cards; ":N" after the name gives N such nodes.

    Raises:
        ConfigError: there is no such file, name or card, N is not a sensible number, or several nodes are asked of a
            file that describes several already.
    """
    if os.path.isfile(name):  # False also for what can be no path
        return read_file(Path(name), CLUSTER)
    stem, _, count = name.rpartition(":") if ":" in name else (name, "", "1")
    if os.path.isfile(stem):
        cluster = read_file(Path(stem), CLUSTER)
    elif stem in shipped_clusters():
        text = (files(__package__) / f"{stem}.json").read_text(encoding="utf-8")
        cluster = cluster_from_text(text, source=stem)
    else:
        cluster = cluster_of_cards(stem)
    if not count.isdecimal() or len(count) > len(str(MAX_NODES)) or not 1 <= int(count) <= MAX_NODES:
        raise ConfigError(f"{name[:100]!r}: give the number of nodes as 1 to {MAX_NODES}, e.g. {stem}:4")
    return repeat_nodes(cluster, int(count))


def check_ranks(cluster: Cluster, num_ranks: int, *, source: str) -> None:
    """Refuse a cluster that is too small for a plan; `source` is the plan's file, or words for it.

    Raises:
        ConfigError: the plan has more ranks than the cluster.
    """
    if num_ranks > cluster.num_ranks:
        raise ConfigError(
            f"{source} is for {num_ranks} ranks, but cluster {cluster.name} has {cluster.num_ranks}; give the cluster "
            "for which it was made"
        )


def repeat_nodes(cluster: Cluster, count: int) -> Cluster:
    """A cluster of `count` nodes like the only one of `cluster`.

    Raises:
        ConfigError: the cluster has several nodes already.
    """
    if count == 1:
        return cluster
    if cluster.nodes[-1] != 0:
        raise ConfigError(f"cluster {cluster.name} has {cluster.nodes[-1] + 1} nodes already; leave out :{count}")
    return replace(repeated(cluster, count), name=f"{cluster.name}:{count}")


def known_cards() -> tuple[str, ...]:
    """The names of all GPUs that a cluster may name."""
    return tuple(name for name, rates in DEVICES.items() if rates.device_type == "cuda")


def cluster_of_cards(text: str) -> Cluster:
    """The cluster of one machine with the cards in `text`, such as "rtx3090x4" or "2 x rtx4090 + 1 x rtx3090@pcie5".

    The name after "@" is the link between the cards; without it they have the slowest of their usual links. Speeds are
    relative to the first card.

    Raises:
        ConfigError: a card or the link is not known, or there are more cards than one machine has.
    """
    words, _, link = text.partition("@")
    parts = [_part(part.strip(), text) for part in words.split("+")]
    link = link.strip() or min((rates.link for rates, _ in parts), key=lambda name: LINKS[name].messages)
    if link not in LINKS:
        raise ConfigError(f"there is no cluster {text!r}: the link {link!r} is not known; use {', '.join(LINKS)}")
    if sum(count for _, count in parts) > MOST_DEVICES:
        raise ConfigError(
            f'there is no cluster {text!r}: one machine has at most {MOST_DEVICES} cards; add ":N" to a name for N '
            "machines"
        )
    # All ranks train in one precision: a card without bfloat16 makes it float32 for all.
    has_bfloat16 = all(rates.has_bfloat16 for rates, _ in parts)
    first = parts[0][0]
    devices = [(_device(rates, first, link, has_bfloat16=has_bfloat16), count) for rates, count in parts]
    name = "+".join(f"{rates.name}x{count}" for rates, count in parts)
    usual = min((rates.link for rates, _ in parts), key=lambda one: LINKS[one].messages)
    return linked(name + (f"@{link}" if link != usual else ""), tuple(devices), link)


def with_more_cards(cluster: Cluster) -> tuple[Cluster, ...]:
    """The clusters of one machine with 2, 4 and 8 (`MOST_DEVICES`) of a cluster's cards, if these are more than it has.

    Their links are the usual ones of the card, also where the cluster is from a file and has another link. () where
    its cards are of several kinds or not known, or it has several nodes.
    """
    names = {device.name for device in cluster.devices}
    # A CPU has no link, and no name that a cluster may use.
    card = next((rates.name for rates in DEVICES.values() if {rates.title} == names and rates.link), None)
    if card is None or cluster.nodes[-1]:
        return ()
    counts = (count for count in (2, 4, 8) if count > cluster.num_ranks)
    return tuple(load_cluster(f"{card}x{count}") for count in counts)


def computes_in_bfloat16(cluster: Cluster) -> bool:
    """Whether all devices of the cluster train in bfloat16: GPUs, but for those that are known to lack it."""
    return device_without_bfloat16(cluster) is None


def device_without_bfloat16(cluster: Cluster) -> str | None:
    """The name of the cluster's first device that trains in float32, a CPU or a GPU without bfloat16; None if none."""
    without = {rates.title for rates in DEVICES.values() if not rates.has_bfloat16 or rates.device_type == "cpu"}
    named = (device.name for device in cluster.devices)
    return next((name for name in named if name in without or name == ANY_CPU or _CPU.search(name)), None)


def _part(text: str, whole: str) -> tuple[DeviceRates, int]:
    """(rates of the card, number of cards) from one part of a cluster's name, "rtx3090x4"; `whole` is that name.

    Raises:
        ConfigError: the part is not a known card with a number; the message has `whole`.
    """
    # "rtx3090" alone looks like 3090 cards of the kind "rt".
    found = _COUNTED.fullmatch(text) or (None if text in DEVICES else _NAMED.fullmatch(text))
    card, count = (found["card"].strip(), int(found["count"])) if found else (text, 0)
    known = known_cards()
    if card not in known:
        raise ConfigError(
            f"there is no cluster {whole!r}: neither a file nor a known name\n{_near(card, max(count, 1), known)}"
        )
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(
            f"there is no cluster {whole!r}: give 1 to {MOST_DEVICES} cards of a machine after the name, e.g. "
            f'{card}x2; add ":N" for N machines'
        )
    return DEVICES[card], count


def _near(card: str, count: int, known: tuple[str, ...]) -> str:
    """Two lines for the error of an unknown card: similar names with `count` after them, all names, and the remedy."""
    short = re.sub(r"[^a-z0-9]", "", card.lower()).removeprefix("nvidia").removeprefix("geforce")
    digits = re.sub(r"[^0-9]", "", short)
    near = [one for one in known if short and (short in one.replace("-", "") or (len(digits) > 3 and digits in one))]
    near += [one for one in get_close_matches(short, known, n=3) if one not in near]
    names = f"Did you mean {' or '.join(f'{one}x{count}' for one in near[:3])}? " if near else ""
    return (
        f'{names}Cards are {", ".join(known)}, each with "xN"; "diffusionpipe cluster --list" has other names.\n'
        'Measure yours with "diffusionpipe cluster --ranks N --out FILE", or add ":N" to a name for N nodes.'
    )


def _device(rates: DeviceRates, first: DeviceRates, link: str, *, has_bfloat16: bool) -> Device:
    """The cluster's device for a card of these rates, with its speed relative to the card `first`."""
    speed = 1.0 if rates is first else round(speed_of(rates, first, has_bfloat16=has_bfloat16), 2)
    return Device(name=rates.title, memory=rates.usable, speed=speed, host_bandwidth=LINKS[link].host * 1e9)


def speed_of(rates: DeviceRates, first: DeviceRates, *, has_bfloat16: bool) -> float:
    """The speed of a card of these rates as a multiple of the speed of `first`, both in bfloat16 or both in float32.

    A step takes `OF_PRODUCTS` of its time for matrix products on the first card, and the rest for moving data.
    """
    dtype = "bfloat16" if has_bfloat16 else "float32"
    products, data = (
        # The rates that kernels reach: operations and bytes a second.
        (one.peak(dtype, is_convolution=False) * one.efficiency.matmul, one.bandwidth * one.efficiency.memory)
        for one in (first, rates)
    )
    return 1 / (OF_PRODUCTS * products[0] / data[0] + (1 - OF_PRODUCTS) * products[1] / data[1])

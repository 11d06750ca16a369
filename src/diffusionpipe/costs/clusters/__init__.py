"""Clusters that come with DiffusionPipe, one file for one node (or one machine) each.

How they are called:

    a100-80x8      one node of 8 A100
    a100-80x8:4    four such nodes, joined as the file's `inter` and `inter_reduce` say

Bandwidths are the part of the links that NCCL reaches: four fifths of NVLink and of the network, PCIe 4 through the
host's memory on GeForce cards. The A100 nodes share 400 Gb/s between all 8 ranks, the H100 and H200 nodes have it for
each. Messages count all ranks of a node sending at once; a sum over whole nodes has the whole node's network. Host
memory is read at half of what a device's PCIe lanes can do, because all devices read at once. These are assumptions;
"diffusionpipe cluster --ranks N" measures. Memory is the rest after torch's own use.
"""

import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from diffusionpipe.costs.cluster import Cluster, repeated
from diffusionpipe.costs.files import CLUSTER, cluster_from_text
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_file

MAX_NODES = 1024


def shipped_clusters() -> tuple[str, ...]:
    """The names of all shipped clusters, in alphabetical order."""
    return tuple(sorted(Path(entry.name).stem for entry in files(__package__).iterdir() if entry.name.endswith("json")))


def load_cluster(name: str) -> Cluster:
    """The cluster of a file, of a shipped name, or of either with ":N" for N such nodes.

    Raises:
        ConfigError: there is no such file or name, N is not a sensible number, or several nodes are asked of a file
            that describes several already.
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
        raise ConfigError(
            f"there is no cluster {name!r}: neither a file nor one of {', '.join(shipped_clusters())}\n"
            'Measure yours with "diffusionpipe cluster --ranks N --out FILE", or add ":N" to a name for N nodes.'
        )
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

"""The part of a cluster that a plan may use: some of its ranks, some of their memory."""

from collections.abc import Sequence

from diffusionpipe.costs import Cluster
from diffusionpipe.costs.cluster import of_ranks, with_memory
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.rows import GIB


def allowed_of(cluster: Cluster, memory: float | None) -> Cluster:
    """The cluster with at most `memory` GiB of each device; None: with all memory that training may use."""
    return cluster if memory is None else with_memory(cluster, round(memory * GIB))


def used_of(cluster: Cluster, use: Sequence[int], *, source: str) -> Cluster:
    """The cluster of the named ranks alone; the whole cluster where `use` is ().

    `source` names the option or key in errors.

    Raises:
        ConfigError: the cluster has no such rank.
    """
    lacking = [rank for rank in use if rank >= cluster.num_ranks]
    if lacking:
        raise ConfigError(
            f"{source}: cluster {cluster.name} has ranks 0 to {cluster.num_ranks - 1}, and no rank "
            f"{', '.join(map(str, lacking))}; leave it out, or name a larger cluster"
        )
    return of_ranks(cluster, sorted(use)) if use else cluster

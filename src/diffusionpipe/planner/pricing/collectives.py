"""The time of collectives over some of a cluster's ranks while all others run theirs."""

from collections import Counter
from collections.abc import Sequence

from diffusionpipe.costs import AllReduce, Cluster
from diffusionpipe.units import Bytes, Seconds


def all_reduce(cluster: Cluster, num_bytes: Bytes, ranks: Sequence[int]) -> Seconds:
    """The seconds of a sum of `num_bytes` bytes over these ranks; 0 where there is nothing to sum.

    `Cluster.inter_reduce` is the bus bandwidth of whole nodes. A group that has only k of a node's n ranks gets k / n
    of it, because the stages that the other ranks hold are reduced at the same time through the same network cards:
    splitting a model over stages makes no gradient byte cheaper to reduce.
    """
    rate = reduction_rate(cluster, ranks)
    return rate.seconds(num_bytes, len(ranks)) if num_bytes else 0.0


def all_gather(cluster: Cluster, num_bytes: Bytes, ranks: Sequence[int]) -> Seconds:
    """The seconds in which each of these ranks gets all of `num_bytes` bytes, of which it holds an equal part.

    Half of an all-reduce's traffic. A reduce-scatter costs the same.
    """
    rate = reduction_rate(cluster, ranks)
    if len(ranks) < 2 or not num_bytes:
        return 0.0
    return rate.latency + (len(ranks) - 1) / len(ranks) * num_bytes / rate.bandwidth


def rooted(cluster: Cluster, sizes: Sequence[Bytes], ranks: Sequence[int]) -> Seconds:
    """The seconds of sending these sizes one after the other from one rank to all others, or of summing them at one.

    A size of 0 takes no time. Pieces pass along a ring one after the other, so every link carries all bytes once.
    """
    rate = reduction_rate(cluster, ranks)
    sent = [size for size in sizes if size] if len(ranks) > 1 else []
    return sum(rate.latency + size / rate.bandwidth for size in sent)


def reduction_rate(cluster: Cluster, ranks: Sequence[int]) -> AllReduce:
    """The latency and bus bandwidth of collectives over these ranks while all other ranks run theirs.

    See `all_reduce`.
    """
    of_node = Counter(cluster.nodes[rank] for rank in ranks)
    if len(of_node) < 2:
        return cluster.intra_reduce
    sizes = Counter(cluster.nodes)
    # The node with the smallest share of its ranks is slowest, and all wait for it.
    share = min(count / sizes[node] for node, count in of_node.items())
    return AllReduce(latency=cluster.inter_reduce.latency, bandwidth=cluster.inter_reduce.bandwidth * share)

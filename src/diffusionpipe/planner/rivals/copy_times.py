"""Times whole and sharded copies of a model on a part of the batch: compute beside a queue of collectives.

A bucket of gradients is summed after the backward that fills it, or all are summed after the last one. In ZeRO-3 a
layer is gathered from the start of the one before it on, and its gradients are summed after its backward:

    data parallelism   compute      F B3 B2 B1 B0             ZeRO-3   compute         F0 F1 F2
                       sums              s3 s2 s1 s0                   collectives  g0 g1 g2
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from diffusionpipe.costs import Cluster
from diffusionpipe.planner.pricing.collectives import all_gather, all_reduce
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.timing import START
from diffusionpipe.timing.sequences import Sequences
from diffusionpipe.units import Bytes, Seconds

DDP_BUCKET = 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sums at a time."""
COMPUTE, COLLECTIVES = "compute", "collectives"


def data_parallel_times(judge: Judge, samples: float, *, is_overlapped: bool) -> tuple[Seconds, Seconds]:
    """(seconds of one forward and backward, seconds with the sum of the gradients), for `samples` samples a rank.

    `is_overlapped`: gradients are summed while the backward runs, else after it.
    """
    whole, summed = gradient_times(judge, samples, all_reduce, is_overlapped=is_overlapped)
    return whole, max(whole, summed)


Collective = Callable[[Cluster, Bytes, Sequence[int]], Seconds]


def gradient_times(
    judge: Judge, samples: float, collective: Collective, *, is_overlapped: bool = True
) -> tuple[Seconds, Seconds]:
    """(end of one forward and backward, end of the sum of the last bucket of gradients), in seconds.

    `samples`: the samples of a rank. `collective` gives the time of a bucket's sum; without overlap all sums come after
    the backward.
    """
    table, cluster = judge.tables.table, judge.setting.cluster
    sums = table.sums(samples, 1)  # it casts for each part of the batch anew
    slowest = min(device.speed for device in cluster.devices)
    ranks = range(cluster.num_ranks)
    sequences, pending, ready, seconds = Sequences(), 0, list[int](), list[Seconds]()
    computed = sequences.add(COMPUTE, sums.forward[-1] / slowest)
    for layer in range(judge.tables.num_layers - 1, -1, -1):
        computed = sequences.add(COMPUTE, (sums.backward[layer + 1] - sums.backward[layer]) / slowest)
        pending += table.held(layer, layer + 1).gradients
        if pending >= DDP_BUCKET or not layer:  # the first layer's gradients come last and close the last bucket
            ready.append(computed)
            seconds.append(collective(cluster, pending, ranks))
            pending = 0
    for behind, one in zip(ready, seconds, strict=True):
        summed = sequences.add(COLLECTIVES, one, behind=behind if is_overlapped else computed)
    ends = sequences.ends()
    return ends[computed], ends[summed]


def gathering_time(gathers: Sequence[Seconds], computes: Sequence[Seconds]) -> Seconds:
    """The seconds of layers that run one after the other, each of which is gathered while the one before it computes.

    `gathers`, `computes`: seconds of each layer.
    """
    sequences, begun, computed = Sequences(), START, START
    for gather, compute in zip(gathers, computes, strict=True):
        gathered = sequences.add(COLLECTIVES, gather, behind=begun)
        # Without length: the moment at which the layer begins, from which on the next one is gathered.
        begun = sequences.add(COMPUTE, 0.0, behind=gathered if gather else START)
        computed = sequences.add(COMPUTE, compute)
    return sequences.ends()[computed]


def gathered_bytes(judge: Judge) -> list[Bytes]:
    """The bytes of each layer's parameters when they are gathered, by layer, in the precision of their use."""
    return [after - before for before, after in pairwise(judge.tables.table.gathered_bytes)]


def zero3_times(
    judge: Judge, samples: float, ranks: Sequence[int] = (), holders: Sequence[int] = ()
) -> tuple[Seconds, Seconds]:
    """(seconds of one forward's and backward's compute, seconds with all communication) of ZeRO-3.

    All communication uses one queue. `samples`: the samples of a rank. `ranks`: the ranks that divide the parameters
    between them; () for all. `holders`: the ranks that hold the same part and sum its gradients; () for none.
    """
    table, cluster, num_layers = judge.tables.table, judge.setting.cluster, judge.tables.num_layers
    sums, ranks = table.sums(samples), ranks or range(cluster.num_ranks)
    slowest = min(device.speed for device in cluster.devices)
    casts = [(table.casts[i + 1] - table.casts[i]) / len(ranks) / slowest for i in range(num_layers)]
    gathers = [
        cast + all_gather(cluster, num_bytes, ranks)
        for cast, num_bytes in zip(casts, gathered_bytes(judge), strict=True)
    ]
    gradients = [table.held(i, i + 1).gradients for i in range(num_layers)]
    sequences, begun, computed, reduction = Sequences(), START, START, 0.0
    passes = [(i, sums.forward, False) for i in range(num_layers)]
    passes += [(i, sums.backward, True) for i in range(num_layers - 1, -1, -1)]
    for layer, running, is_backward in passes:
        # The gather of a layer is queued when the layer before it begins, and the latter's reduction at its end.
        gathered = sequences.add(COLLECTIVES, gathers[layer], behind=begun)
        if reduction:
            sequences.add(COLLECTIVES, reduction, behind=computed)
        begun = sequences.add(COMPUTE, 0.0, behind=gathered if gathers[layer] else START)
        computed = sequences.add(COMPUTE, (running[layer + 1] - running[layer]) / slowest)
        if is_backward:
            reduction = all_gather(cluster, gradients[layer], ranks)
            reduction += all_reduce(cluster, -(-gradients[layer] // len(ranks)), holders) if len(holders) > 1 else 0.0
    sequences.add(COLLECTIVES, reduction, behind=computed)
    return (sums.forward[-1] + sums.backward[-1]) / slowest, max(sequences.ends())

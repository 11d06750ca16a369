"""Data parallelism as people tune it: what else whole copies of a model can do against sums and encoders.

    encodes ahead     the encoders run for the next batch, after the backward, while the last gradients are summed
    bf16 sums         gradients travel in two bytes (torch's bf16_compress_hook); casting them is not counted
    ZeRO-1            every rank keeps and updates an equal part of the optimizer's state: gradients are scattered while
                      the backward runs, and the updated parameters are gathered after it
    hybrid sharding   ZeRO-3 inside each node; the nodes hold copies, whose gradients are summed part by part
    cached outputs    encoders ran once over the data; a step reads their outputs from disk, which is not counted

Each at its own best accumulation, with its memory. Times leave out what favours none of them: the update itself.

ZeRO-1: Rajbhandari, Rasley, Ruwase, He, SC 2020, https://arxiv.org/abs/1910.02054, as P_os.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.costs import Cluster
from diffusionpipe.holding import Item
from diffusionpipe.planner.pricing.collectives import all_gather, all_reduce
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import (
    Baseline,
    accumulations,
    best_of,
    data_parallel,
    is_better,
    replicated,
    zero3_bytes,
)
from diffusionpipe.planner.rivals.copy_times import DDP_BUCKET, gradient_times, zero3_times
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes, Seconds

AHEAD = "DDP, encodes ahead"
NARROW_SUMS = "DDP, bf16 sums"
ZERO1 = "ZeRO-1"
HYBRID = "hybrid sharding"
CACHED = "DDP, cached outputs"
RANDOM_INPUTS = ("noise", "time")
"""Raw inputs that are drawn anew in every step, by the ends of their names; what depends on them cannot be cached."""


def tuned_copies(setting: Setting) -> tuple[Baseline, ...]:
    """All of them that the batch can be shared for.

    Cached outputs only where there is something to cache, hybrid sharding only over several equal nodes: in one node it
    is ZeRO-3.
    """
    systems: tuple[Callable[[Judge], Baseline | None], ...] = (encoding_ahead, narrow_sums, zero1, hybrid)
    found = [best_of(system, setting) for system in systems]
    if cacheable_layers(setting):
        found.append(best_of(_on_cache, cached(setting)))
    return tuple(one for one in found if one is not None)


def encoding_ahead(judge: Judge) -> Baseline | None:
    """Whole copies that encode the next batch while the last gradients are summed.

    The sum of gradients begins in the last backward. The step ends when both the encoders and the sum do:

        compute  F B F B---- ENCODE          sums      1 2 3---4
    """
    table = judge.tables.table
    next_batch = table.frozen_reads[0][judge.tables.num_layers]

    def step(samples: float, count: int) -> Seconds:
        whole, summed = gradient_times(judge, samples, all_reduce)
        return (count - 1) * whole + max(whole + judge.tables.frozen_seconds, summed)

    return _best(judge, AHEAD, step, lambda samples, count: round(samples * count * next_batch))


def narrow_sums(judge: Judge) -> Baseline | None:
    """Whole copies whose gradients are summed in two bytes; a bucket's copies are in memory too."""

    def compressed(cluster: Cluster, num_bytes: Bytes, ranks: Sequence[int]) -> Seconds:
        return all_reduce(cluster, num_bytes * 2 // judge.setting.workload.width(Item.GRADIENTS), ranks)

    def step(samples: float, count: int) -> Seconds:
        whole, summed = gradient_times(judge, samples, compressed)
        return judge.tables.frozen_seconds + (count - 1) * whole + max(whole, summed)

    return _best(judge, NARROW_SUMS, step, lambda *_: DDP_BUCKET // 2)


def zero1(judge: Judge) -> Baseline | None:
    """Whole copies of parameters and gradients, the optimizer's state and the average in equal parts."""
    setting, held = judge.setting, judge.tables.table.held(0, judge.tables.num_layers)
    ranks = range(setting.cluster.num_ranks)
    gathering = all_gather(setting.cluster, held.parameters, ranks)
    state = held.optimizer + held.ema
    saved = state - -(-state // len(ranks))

    def step(samples: float, count: int) -> Seconds:
        whole, summed = gradient_times(judge, samples, all_gather)
        return judge.tables.frozen_seconds + (count - 1) * whole + max(whole, summed) + gathering

    found = _best(judge, ZERO1, step, lambda *_: -saved)
    return found and replace(found, updated=found.updated / len(ranks))


def hybrid(judge: Judge) -> Baseline | None:
    """ZeRO-3 inside nodes, copies between them; None for one node, or for nodes of different sizes."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(judge.setting.cluster.nodes):
        nodes.setdefault(node, []).append(rank)
    first = next(iter(nodes.values()))
    if len(nodes) < 2 or len(first) < 2 or len({len(ranks) for ranks in nodes.values()}) > 1:
        return None
    holders = [ranks[0] for ranks in nodes.values()]
    best: Baseline | None = None
    for rows, count in accumulations(judge):
        busy, step = zero3_times(judge, rows / count, first, holders)
        held = zero3_bytes(judge, rows / count, count, len(first))
        one = replicated(judge, HYBRID, count, count * step, count * busy, held)
        one = replace(one, sizes=f"{len(nodes)} copies in parts over {len(first)}{one.sizes.partition('copies')[2]}")
        one = replace(one, updated=one.updated / len(first))
        if best is None or is_better(one, best):
            best = one
    return best


def _best(
    judge: Judge, name: str, step: Callable[[float, int], Seconds], more: Callable[[float, int], Bytes]
) -> Baseline | None:
    """The best accumulation of copies that take `step` and hold `more` than those of DDP."""
    best: Baseline | None = None
    for rows, count in accumulations(judge):
        samples = rows / count
        sums = judge.tables.table.sums(samples, 1)
        slowest = min(device.speed for device in judge.setting.cluster.devices)
        busy = count * (sums.forward[-1] + sums.backward[-1]) / slowest
        held = judge.footprint.stage_bytes(0, judge.tables.num_layers, samples, count, 1) + more(samples, count)
        one = replicated(judge, name, count, step(samples, count) - judge.tables.frozen_seconds, busy, held)
        one = replace(one, is_copy=True)
        if best is None or is_better(one, best):
            best = one
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What it takes to keep encoder outputs on disk.

    It forbids whatever changes them from epoch to epoch: other crops and flips, other captions or dropped ones made by
    the encoder, another VAE sample, and training of the encoders.
    """

    sample_bytes: Bytes
    """On disk for each sample."""
    seconds: Seconds
    """That all devices of the cluster take to make the outputs of one batch."""


def cache_of(setting: Setting) -> Cache:
    """What caching all that can be cached of a model takes."""
    graph, kept = setting.graph, cached(setting)
    written = graph.writes_of(cacheable_layers(setting))
    read = set(kept.graph.inputs)
    saved = Judge(setting=setting).tables.frozen_seconds - Judge(setting=kept).tables.frozen_seconds
    return Cache(
        sample_bytes=sum(one.num_bytes for one in graph.tensors if one.name in read & {*written}), seconds=saved
    )


def cacheable_layers(setting: Setting) -> tuple[str, ...]:
    """Frozen layers that give the same for a sample in every step."""
    graph = setting.graph
    frozen = set(graph.frozen_layers)
    drawn = {name for name in graph.inputs if name.rpartition(".")[2] in RANDOM_INPUTS}
    found = []
    for layer in graph.layers:
        if layer.name in frozen and not drawn.intersection(layer.reads):
            found.append(layer.name)
        else:
            drawn.update(layer.writes)
    return tuple(found)


def cached(setting: Setting) -> Setting:
    """The setting with the outputs of all cacheable layers as raw inputs."""
    profile, gone = setting.profile, set(cacheable_layers(setting))
    kept = [layer for layer in profile.graph.layers if layer.name not in gone]
    written = {name for layer in kept for name in layer.writes}
    read = dict.fromkeys(name for layer in kept for name in layer.reads if name not in written)
    used = {name for layer in kept for name in layer.parameters}
    graph = replace(
        profile.graph,
        layers=tuple(kept),
        inputs=tuple(read),
        parameters=tuple(one for one in profile.graph.parameters if one.name in used),
    )
    layers = tuple(layer for layer in profile.layers if layer.name not in gone)
    return replace(setting, profile=replace(profile, graph=graph, layers=layers))


def _on_cache(judge: Judge) -> Baseline | None:
    found = data_parallel(judge, is_overlapped=True)
    return found and replace(found, name=CACHED)

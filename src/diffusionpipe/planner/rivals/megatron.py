"""Chooses a layout as Megatron-LM would by the takeaways of its paper, with tensor parallelism of size 1.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
https://arxiv.org/abs/2104.04473, section 3. The paper cuts equal layers. So layers whose parameters have the shapes of
another layer's are counted here, and each other layer stays with the counted one before it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from diffusionpipe.costs import Cluster, ModelGraph
from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.rivals.baselines import MAX_MICROBATCHES
from diffusionpipe.planner.rivals.guesses import PlannerEstimate, overflow_of
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.schedules.families.interleaved import interleaved
from diffusionpipe.units import Seconds


def counted_layers(graph: ModelGraph) -> tuple[int, ...]:
    """The positions, among the trained layers, of layers whose parameters have the shapes of another layer's.

    If no two layers are alike, all positions.
    """
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    of_layer = {layer.name: layer.parameters for layer in graph.layers}
    kinds = [tuple(sorted(shapes[name] for name in of_layer[layer])) for layer in graph.backbone_layers]
    often = Counter(kinds)
    # Layers without parameters are alike, but no part of a model.
    return tuple(i for i, kind in enumerate(kinds) if kind and often[kind] > 1) or tuple(range(len(kinds)))


def equal_starts(counted: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """The first layer of each of `num_parts` parts of a model, whose numbers of counted layers differ by one at most.

    `counted`: the positions of the counted layers.

    >>> equal_starts((2, 3, 4, 5), 2), equal_starts((2, 3, 4), 2)
    ((0, 4), (0, 3))
    """
    return (0, *(counted[part * len(counted) // num_parts] for part in range(1, num_parts)))


def chunks_tried(num_counted: int, num_stages: int) -> tuple[int, ...]:
    """The numbers of chunks a device that divide the counted layers equally, most first; the last is 1.

    >>> chunks_tried(24, 4), chunks_tried(24, 1), chunks_tried(25, 4)
    ((6, 3, 2, 1), (1,), (1,))
    """
    if num_stages == 1 or num_counted % num_stages:
        return (1,)
    own = num_counted // num_stages
    return tuple(chunks for chunks in range(own, 0, -1) if own % chunks == 0)


def tensor_size(cluster: Cluster, num_stages: int) -> int:
    """The size of tensor parallelism that Megatron-LM's paper would take where `num_stages` parts of the model fit.

    It is the least divisor of a node's devices that makes as many parts, else all devices of the node: Megatron-LM cuts
    layers before it cuts the chain of layers, but only inside a node.
    """
    node = cluster.nodes.count(0)
    return next(size for size in range(1, node + 1) if node % size == 0 and size >= min(num_stages, node))


def megatron_time(num_microbatches: int, num_stages: int, both: Seconds) -> Seconds:
    """The seconds of an iteration by the paper's formula: (micro-batches + stages - 1) x `both`.

    `both`: forward and backward of a micro-batch on the slowest device, (b'/b + p - 1) (t_f(b) + t_b(b)) in the paper.
    """
    return (num_microbatches + num_stages - 1) * both


def megatron_guesses(judge: Judge) -> Iterator[PlannerEstimate]:
    """Megatron-LM's layouts, one for each number of micro-batches, with its estimates.

    They have the fewest stages, and then the most chunks, that fit in memory with some number of micro-batches. If
    nothing fits, layouts of all sizes are returned.
    """
    cluster, counted = judge.setting.cluster, counted_layers(judge.setting.graph)
    sizes: dict[int, Arrangement] = {}
    for arrangement in arrangements(cluster):  # its ranks are numbered so that the copies are side by side
        if arrangement.units <= len(counted) and judge.setting.workload.batch % arrangement.data_parallel == 0:
            sizes[arrangement.units] = arrangement
    found: list[PlannerEstimate] = []
    for num_stages, arrangement in sorted(sizes.items()):
        for chunks in chunks_tried(len(counted), num_stages):
            guesses = list(_guesses_at(judge, arrangement, equal_starts(counted, num_stages * chunks)))
            if any(overflow_of(one) <= 0 for one in guesses):
                yield from guesses
                return
            found += guesses
    yield from found


def _guesses_at(judge: Judge, arrangement: Arrangement, starts: tuple[int, ...]) -> Iterator[PlannerEstimate]:
    num_stages, chunks = arrangement.units, len(starts) // arrangement.units
    spans = list(pairwise((*starts, judge.tables.num_layers)))
    size = tensor_size(judge.setting.cluster, num_stages)
    rows = judge.setting.workload.batch // arrangement.data_parallel
    for count in (count for count in range(1, min(rows, MAX_MICROBATCHES) + 1) if rows % count == 0):
        if chunks > 1 and count % num_stages:  # the interleaved order needs whole rounds of micro-batches
            continue
        steps = judge.tables.table.sums(judge.tables.unit_samples(arrangement, count), count).steps()
        speeds = judge.tables.ground(arrangement).speeds
        # A device has every `num_stages`-th chunk.
        both = [sum(sum(steps[slice(*span)]) for span in spans[own::num_stages]) for own in range(num_stages)]
        slowest = max(seconds / speed for seconds, speed in zip(both, speeds, strict=True))
        candidate = Candidate(
            arrangement=arrangement,
            schedule="interleaved" if chunks > 1 else "1f1b",
            microbatches=count,
            starts=starts,
            replicas=(1,) * num_stages,
            orders=interleaved(num_stages, count, chunks=chunks) if chunks > 1 else None,
        )
        yield PlannerEstimate(
            judge=judge,
            candidate=candidate,
            seconds=megatron_time(count, num_stages, slowest),
            remark=f"The paper would take tensor size {size} here"
            + ("; DiffusionPipe has no tensor parallelism, so these parts are stages" if size > 1 else ", as this row"),
        )

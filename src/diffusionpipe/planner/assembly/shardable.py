"""Checks of layouts whose copies hold parameters in parts, and the number of their buckets."""

from collections.abc import Iterator, Sequence
from math import prod

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.sharding import blocks_in_common
from diffusionpipe.ir import Schedule
from diffusionpipe.ir.schedule import lone_blocks

LARGE_BLOCK = 2**23
"""The number of parameters of a block above which it is gathered in several buckets, if the layout gives no number."""
MIN_BUCKETS = 4
"""The least number of buckets of a sharded stage, so that not all of a small model is whole at a time."""


def sharding_problems(data_parallel: int, replicas: Sequence[int]) -> Iterator[str]:
    """One sentence for each size that has no meaning with sharded parameters: one copy, or replicas of stages."""
    if data_parallel == 1:
        yield refusal(Feature.SHARDED, Feature.ONE_COPY)
    if max(replicas, default=1) > 1:
        yield refusal(Feature.SHARDED, Feature.REPLICAS)


def check_homes(schedule: Schedule) -> None:
    """Raise an error if a schedule puts a block on several workers, so that it cannot be sharded.

    Raises:
        ConfigError: it puts a block on several workers.
    """
    if {stage.weights for stage in schedule.placement.stages} - lone_blocks(schedule):
        raise ConfigError(refusal(Feature.SHARDED, Feature.TWO_DIRECTIONS, schedule=schedule.name))


def check_shardable(graph: ModelGraph, blocks: Sequence[Sequence[str]]) -> None:
    """Raise an error if layers of several blocks use one parameter, so that these blocks cannot be sharded.

    Raises:
        ConfigError: layers of several blocks use one parameter.
    """
    if common := blocks_in_common(graph, blocks):
        why = refusal(Feature.SHARDED, Feature.TIED, parameter=next(iter(common)), count=len(common))
        raise ConfigError(why)


def sharded_buckets(graph: ModelGraph, partition: Sequence[Sequence[str]]) -> int:
    """The number of buckets of each stage of a sharded layout: at least 4, as far as a stage has that many layers.

    More where the largest block has more than 4 times `LARGE_BLOCK` parameters: then about `LARGE_BLOCK` are in each.
    """
    sizes = {p.name: prod(p.shape) for p in graph.parameters}
    of_layer = {layer.name: sum(sizes[name] for name in layer.parameters) for layer in graph.layers}
    largest = max(sum(of_layer[name] for name in block) for block in partition)
    return min(max(MIN_BUCKETS, largest // LARGE_BLOCK), min(map(len, partition)))

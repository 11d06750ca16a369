"""Lists the edges between the workers of trained stages, and the time that messages take from the workers' compute."""

from collections.abc import Callable, Sequence

from diffusionpipe.costs import Link
from diffusionpipe.ir import Edge, Placement
from diffusionpipe.planner.pricing.layer_table import Load
from diffusionpipe.units import Seconds

Meeting = tuple[Edge, tuple[int, int], int, float]
"""(edge, its two workers, samples of a micro-batch that pass, part of the consumer's micro-batches for which they
pass). The part is 1, except where a probe's estimate is read."""


def exchanges_of(placement: Placement) -> tuple[Meeting, ...]:
    """All edges between trained stages on different workers over which samples pass, with the samples."""
    stages, found = placement.stages, list[Meeting]()
    for pipeline in placement.pipelines:
        size = max(pipeline.microbatches)
        for edge in pipeline.edges:
            one, other = stages[edge.producer], stages[edge.consumer]
            if one.worker == other.worker or placement.is_frozen(edge.producer):
                continue
            if samples := len(one.share.samples(size).intersection(other.share.samples(size))):
                part = len(placement.pipeline_of(edge.producer).numbers) / len(pipeline.numbers)
                found.append((edge, (one.worker, other.worker), samples, part))
    return tuple(found)


def occupancy(
    num_stages: int,
    meetings: Sequence[Meeting],
    link_of: Callable[[tuple[int, int]], Link],
    loads: Callable[[Edge], tuple[Load, Load]],
) -> list[tuple[Seconds, Seconds]]:
    """(forward, backward) seconds that sends and receives take from each stage's compute of a micro-batch, by stage.

    `link_of`: (worker, worker) -> their link. `loads`: edge -> its loads forward and back, as (bytes of a sample,
    number of tensors).
    """
    forward, backward = ([0.0] * num_stages for _ in range(2))
    for edge, pair, samples, part in meetings:
        link = link_of(pair)
        if not (link.overhead or link.overhead_per_byte):
            continue
        for seconds, (num_bytes, num_tensors) in zip((forward, backward), loads(edge), strict=True):
            taken = link.occupancy(samples * num_bytes, num_tensors)
            seconds[edge.producer] += taken
            seconds[edge.consumer] += part * taken
    return list(zip(forward, backward, strict=True))

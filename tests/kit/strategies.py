"""Random schedules and costs for property tests."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from hypothesis import strategies as st

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Edge, Placement, Schedule
from diffusionpipe.passes import connect, insert_encoding, reduce_gradients, replicate
from diffusionpipe.schedules import REGISTRY, Generator, forward_only, gpipe, one_f_one_b
from diffusionpipe.timing import Streams

generators = st.sampled_from([*REGISTRY.values(), forward_only])
trainers = st.sampled_from(list(REGISTRY.values()))
chains = st.sampled_from([gpipe, one_f_one_b])
"""Families with one stage on each worker and whole backwards, defined for all sizes."""
streams = st.sampled_from([Streams.PAIR, Streams.DIRECTION])
"""Machines whose hosts do not wait for transfers."""
lookaheads = st.integers(0, 4)
durations = st.integers(1, 9)

FROZEN_BLOCK = 100


@st.composite
def edges(draw: st.DrawFn, num_stages: int) -> list[Edge]:
    """The chain and some skips; some of either without a gradient."""
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    skips = draw(st.sets(st.sampled_from(pairs), max_size=3)) if pairs else set()
    found = []
    for a, b in sorted(skips | {(s, s + 1) for s in range(num_stages - 1)}):
        tensors = (f"hidden{a}", f"mask{a}")
        found.append(Edge(producer=a, consumer=b, tensors=tensors, gradients=draw(st.sampled_from([tensors[:1], ()]))))
    return found


@st.composite
def schedules(
    draw: st.DrawFn,
    max_stages: int = 4,
    max_microbatches: int = 5,
    *,
    families: st.SearchStrategy = generators,
) -> Schedule:
    """Compute-only schedules after any combination of the passes before `communicate`."""
    num_workers = draw(st.integers(1, max_stages))
    replicas = draw(st.lists(st.integers(1, 3), min_size=num_workers, max_size=num_workers))
    if draw(st.booleans()):
        replicas = [1] * num_workers
    unit = lcm(*replicas) * draw(st.integers(1, 2))
    schedule = sized(draw(families), num_workers, draw(st.integers(1, max_microbatches)), unit)
    replicas += [1] * (schedule.num_workers - num_workers)
    stages = schedule.placement.stages
    num_blocks = 1 + max(stage.weights for stage in stages)
    found = draw(edges(num_blocks))
    for number, pipeline in enumerate(schedule.placement.pipelines):
        own = [replace(e, producer=pipeline.stages[e.producer], consumer=pipeline.stages[e.consumer]) for e in found]
        schedule = connect(schedule, own, microbatches=_sizes(draw, schedule, number), model="unet", pipeline=number)
    schedule = replicate(schedule, [replicas[stage.worker] for stage in stages])
    if draw(st.booleans()):
        readers = draw(st.sets(st.integers(0, num_blocks - 1), min_size=1))
        outputs = {block: ("text", f"latents{block % 2}") for block in readers}
        chunk = draw(st.integers(1, 5))
        schedule = insert_encoding(schedule, block=FROZEN_BLOCK, outputs=outputs, num_layers=3, max_chunk=chunk)
    return reduce_gradients(schedule, draw(st.booleans()))


def sized(family: Generator, num_workers: int, num_microbatches: int, size: int = 1) -> Schedule:
    """The family's schedule of these sizes or, where it cannot do them, of the next larger ones that it can."""
    for workers in range(num_workers, 2 * num_workers + 4):
        for microbatches in range(num_microbatches, num_microbatches + 3 * workers + 1):
            try:
                return family(workers, microbatches, size)
            except ConfigError:
                continue
    raise AssertionError(f"{family} is defined nowhere near {num_workers} workers, {num_microbatches} micro-batches")


def _sizes(draw: st.DrawFn, schedule: Schedule, pipeline: int) -> list[int]:
    """Micro-batches of one and two times their size."""
    return [size * draw(st.integers(1, 2)) for size in schedule.placement.pipelines[pipeline].microbatches]


@st.composite
def costs_of(draw: st.DrawFn, schedule: Schedule, *, max_latency: int = 4) -> Costs:
    """Uneven integer costs; replicas of a stage cost the same."""
    block = {
        weights: StageCosts(
            forward=draw(durations),
            backward=draw(durations),
            input_grad=draw(durations),
            weight_grad=draw(durations),
            activation=draw(durations),
        )
        for weights in sorted({stage.weights for stage in schedule.placement.stages})
    }
    num_stages = len(schedule.placement.stages)
    reduce = draw(st.integers(0, 9))
    return Costs(
        stages=tuple(block[stage.weights] for stage in schedule.placement.stages),
        fills=tuple(draw(durations) for _ in schedule.fills),
        reduces=(reduce,) * num_stages,
        link=Link(latency=draw(st.integers(0, max_latency))),
    )


def relabelled(schedule: Schedule, permutation: Sequence[int]) -> Schedule:
    """The same work with worker w called permutation[w]."""
    stages = tuple(replace(s, worker=permutation[s.worker]) for s in schedule.placement.stages)
    orders = [()] * schedule.num_workers
    for worker, order in enumerate(schedule.orders):
        orders[permutation[worker]] = order
    placement = Placement(stages=stages, pipelines=schedule.placement.pipelines)
    return replace(schedule, placement=placement, orders=tuple(orders))

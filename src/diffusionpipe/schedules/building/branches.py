"""1F1B over stages that form a graph without circles in place of a chain: GraphPipe's order.

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism", ASPLOS
2025. A stage warms up with one forward for each stage after it on the longest path to the end. So stages on different
branches run at the same time, and hold what a chain of that length holds:

    0 --> 2      the depth of stages 0 and 1 is 2, of stage 2 it is 1
    1 ----^      time (M + d - 1) (F + B) for a longest path of d stages of equal times

A stage's B waits for B of stages of less depth alone, which wait for no later forward than it has done: so no graph
of stages gets stuck.

>>> schedule = branched([(0, 2), (1, 2)], 3, 4)
>>> for order in schedule.orders:
...     print(*order)
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
>>> depths([(0, 2), (1, 2)], 3)
(2, 2, 1)
"""

from collections.abc import Collection
from dataclasses import replace

from diffusionpipe.ir import Edge, Schedule
from diffusionpipe.schedules.building.alternation import alternate
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive

GRAPHPIPE = "graphpipe"
"""The name of the orders that run stages beside each other."""


def branched(
    edges: Collection[tuple[int, int]], num_stages: int, num_microbatches: int, microbatch_size: int = 1
) -> Schedule:
    """The schedule of stages 0, 1, ..., each on a worker of its own, as GraphPipe orders them.

    `edges` are (stage, later stage that reads it).

    Raises:
        ConfigError: a size is below 1.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    orders = [
        alternate(
            [forwards(stage, i, i + 1) for i in range(num_microbatches)],
            [backwards(stage, i, i + 1) for i in range(num_microbatches)],
            warm_up=min(depth - 1, num_microbatches),
        )
        for stage, depth in enumerate(depths(edges, num_stages))
    ]
    made = chain(GRAPHPIPE, orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)
    (pipeline,) = made.placement.pipelines
    own = tuple(Edge(producer=producer, consumer=consumer) for producer, consumer in sorted(edges))
    return replace(made, placement=replace(made.placement, pipelines=(replace(pipeline, edges=own),)))


def over_chain(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """GraphPipe's schedule for stages each of which reads the one before; the orders are 1F1B's.

    Raises:
        ConfigError: a size is below 1.
    """
    edges = [(stage, stage + 1) for stage in range(num_workers - 1)]
    return branched(edges, num_workers, num_microbatches, microbatch_size)


def depths(edges: Collection[tuple[int, int]], num_stages: int) -> tuple[int, ...]:
    """The number of stages on the longest path from each stage to an end, itself included, by stage.

    `edges` are (stage, later stage that reads it).
    """
    # From the last producers to the first. Readers have higher numbers, so their depths are final when they are asked
    # for.
    found = [1] * num_stages
    for producer, consumer in sorted(edges, reverse=True):
        found[producer] = max(found[producer], 1 + found[consumer])
    return tuple(found)

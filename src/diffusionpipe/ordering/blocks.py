"""Orders to start from on a V: repeated building blocks that fill the memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362: the
lifespans of a block set the memory, so of all blocks without collisions those with the longest lifespans that fit are
given. Their slots assume equal times; squeezing (`pulling`) fits them to the problem's.
"""

from collections.abc import Iterator
from itertools import islice

from diffusionpipe.ordering.evaluation import fits
from diffusionpipe.ordering.families import LETTERS_OF_OP
from diffusionpipe.ordering.instance import Placing
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.schedules.building.building_block import V_PERIOD, repeated, v_block, v_shapes

NUM_BLOCKS = 3
"""The most blocks of which `block_orders` gives orders. With equal times the first is as good as the next ones, with
others it need not be."""
MAX_BLOCKS = 100
"""The most blocks that are tried for their memory: with 4 to 8 workers the first that fits was among the first 70."""


def block_orders(problem: Problem) -> Iterator[Letters]:
    """The orders of repeated building blocks that fit into memory, the longest lifespan first; at most `NUM_BLOCKS`.

    None for other placements than a V.
    """
    return islice(filter(lambda orders: fits(problem, orders), _nearly_fitting(problem)), NUM_BLOCKS)


def _nearly_fitting(problem: Problem) -> Iterator[Letters]:
    if problem.placing is not Placing.V:
        return
    largest = max(problem.activation)
    # Activations of one stage for which the poorest rank has room.
    room = min(problem.limits) // largest if largest else 2 * problem.num_ranks
    # In its stride a worker holds an activation for each period that F to the end of W takes, of both stages together:
    # the lifespans and at least I and W of each.
    longest = V_PERIOD * room - 4
    shapes = (shape for shape in v_shapes(problem.num_ranks) if shape.lifespan <= longest)
    for shape in islice(shapes, MAX_BLOCKS):
        block = v_block(problem.num_ranks, hops=shape.hops, waits=shape.waits)
        yield tuple(
            tuple(3 * action.stage + LETTERS_OF_OP[action.op][0] for action in order)
            for order in repeated(block, problem.num_microbatches)
        )

"""Answers about families of schedules that a search over plans needs, read from their orders."""

from functools import cache

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.ir.schedule import lone_blocks
from diffusionpipe.schedules import generator_of

WORKERS, MICROBATCHES = 4, 8
"""The numbers of workers and micro-batches that every family can do; families are judged by them."""


@cache
def is_chain(name: str) -> bool:
    """Whether the schedule family with this name puts one stage on each worker, in order.

    >>> [is_chain(name) for name in ("1f1b", "interleaved", "zb-v")]
    [True, False, False]
    """
    stages = generator_of(name)(WORKERS, MICROBATCHES).placement.stages
    return [stage.worker for stage in stages] == list(range(WORKERS))


@cache
def is_split(name: str) -> bool:
    """Whether the schedule family with this name computes gradients of inputs and of weights in separate actions.

    >>> [is_split(name) for name in ("1f1b", "zb-h1")]
    [False, True]
    """
    return generator_of(name)(WORKERS, MICROBATCHES).splits_backwards


@cache
def holds_one(name: str) -> bool:
    """Whether in the family with this name a micro-batch passes all stages and comes back before the next one starts.

    >>> [holds_one(name) for name in ("sequential", "1f1b")]
    [True, False]
    """
    return is_chain(name) and all(
        [action.op for action in order] == [Op.F, Op.B] * MICROBATCHES
        for order in generator_of(name)(WORKERS, MICROBATCHES).orders
    )


@cache
def holds_blocks_once(name: str) -> bool:
    """Whether in the family with this name each block is held by one worker alone.

    >>> [holds_blocks_once(name) for name in ("1f1b", "zb-v", "chimera")]
    [True, True, False]
    """
    made = generator_of(name)(WORKERS, MICROBATCHES)
    return {stage.weights for stage in made.placement.stages} == lone_blocks(made)


@cache
def is_depth_first(name: str) -> bool:
    """Whether one worker alone, in the family with this name, does each backward right after its forward.

    >>> [is_depth_first(name) for name in ("1f1b", "gpipe", "zb-h1")]
    [True, False, False]
    """
    return _ops_alone(name) == (Op.F, Op.B, Op.F, Op.B)


@cache
def is_breadth_first(name: str) -> bool:
    """Whether one worker alone, in the family with this name, does all forwards before the backwards.

    >>> [is_breadth_first(name) for name in ("1f1b", "gpipe", "zb-h1")]
    [False, True, False]
    """
    return _ops_alone(name) == (Op.F, Op.F, Op.B, Op.B)


def can_shard(name: str) -> bool:
    """Whether copies with sharded weights can use the family with this name.

    One worker alone does whole forwards and whole backwards in it.

    >>> [can_shard(name) for name in ("1f1b", "gpipe", "zb-h1")]
    [True, True, False]
    """
    return is_depth_first(name) or is_breadth_first(name)


def _ops_alone(name: str) -> tuple[Op, ...]:
    """The ops, in order, of a family's only worker with one stage and two micro-batches; () if it has no such order."""
    try:
        schedule = generator_of(name)(1, 2)
    except ConfigError:
        return ()
    return tuple(action.op for action in schedule.orders[0]) if len(schedule.placement.stages) == 1 else ()

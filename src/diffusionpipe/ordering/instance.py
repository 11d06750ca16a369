"""The question of the search: stages with their costs, ranks with their memory, and the time to shorten."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from diffusionpipe.schedules.building.split_work import Goal

Number: TypeAlias = int | float
"""A time or an amount of memory, in any unit. The search works with the decimal that is written, exactly."""


class Placing(StrEnum):
    """The placement of the 2p half-stages, numbered in forward order, on p ranks.

    linear    0 0   1 1   2 2   3 3        both halves of a rank's stage run as one
    v         0 7   1 6   2 5   3 4        down and up again
    loop      0 4   1 5   2 6   3 7        round and round
    """

    LINEAR = "linear"
    V = "v"
    LOOP = "loop"
    ANY = "any"
    """The best of the three placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfStage:
    """The times and memory of half a rank's part of the model for one micro-batch, in any units."""

    forward: Number
    input_grad: Number
    weight_grad: Number
    activation: Number
    """Memory that is held from the start of the forward."""
    kept_after_input_grad: Number
    """The part of the activation that is held on from the end of the input gradient to the end of the weight gradient.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The question of an order search: sizes, costs of half-stages, memory limits and objective.

    Its fields are not checked here; `instance_file.read_instance` checks them.
    """

    ranks: int
    microbatches: int
    placement: Placing
    stages: tuple[HalfStage, ...]
    """The 2 x ranks half-stages in forward order."""
    comm: Number
    """Time of a transfer between two ranks, beside everything else."""
    memory_limit: tuple[Number, ...] | None
    """The most that each rank may hold; None for no limit."""
    objective: Goal
    seconds: Number
    """The effort of the search: a number of evaluations that a slow core does in this time."""

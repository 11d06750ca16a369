"""The published families as orders to start from."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Protocol, cast

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op, Schedule
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.split_work import Goal
from diffusionpipe.units import Seconds

LETTERS_OF_OP: Mapping[Op, tuple[int, ...]] = {Op.F: (0,), Op.B: (1, 2), Op.I: (1,), Op.W: (2,)}
"""Op -> its letters on stage 0: a whole backward is an input gradient and then the weight gradient, so that its result
is there no later."""


def family_orders(problem: Problem) -> Iterator[tuple[str, Letters]]:
    """(name, orders) of every published family that has the problem's placement and can do its sizes.

    Families that take costs come twice: with equal costs, and with the problem's costs and objective.
    """
    for name in REGISTRY:
        for schedule in _schedules(problem, name):
            orders = _letters(problem, schedule)
            if orders is not None:
                yield name, orders


def _schedules(problem: Problem, name: str) -> Iterator[Schedule]:
    """The schedules of the family `name` at the problem's sizes: for equal costs, and for its costs if they matter.

    It yields nothing if the family has another placement or cannot do these sizes.
    """
    sizes = (problem.num_ranks, problem.num_microbatches)
    schedule = _generated(name, *sizes)
    if schedule is None or schedule.placement.workers() != problem.rank:
        return
    yield schedule
    # With equal times and no transfers the family's usual schedule is the one for these costs.
    is_even = len(set(problem.durations)) == 1 and not any(problem.lags)
    known = signature(REGISTRY[name]).parameters.keys()
    if not is_even and {"costs", "latency"} <= known:
        timed = cast("_Timed", REGISTRY[name])
        objective = Goal.WINDOW if problem.is_window else Goal.MAKESPAN
        aim = {"objective": objective} if "objective" in known else {}
        yield timed(*sizes, costs=stage_costs(problem), latency=max(problem.lags), **aim)


@lru_cache(maxsize=64)  # a search over all placements asks once for each
def _generated(name: str, num_ranks: int, num_microbatches: int) -> Schedule | None:
    """The schedule of the family `name` at equal costs; None for sizes that it cannot do."""
    try:
        return REGISTRY[name](num_ranks, num_microbatches)
    except ConfigError:
        return None


class _Timed(Protocol):
    def __call__(
        self,
        num_workers: int,
        num_microbatches: int,
        /,
        *,
        costs: Sequence[StageCosts],
        latency: Seconds,
        **aim: Goal,
    ) -> Schedule: ...


def stage_costs(problem: Problem) -> list[StageCosts]:
    """The costs of the problem's stages, by stage, in its own units of time and memory."""
    times = problem.durations
    return [
        StageCosts(
            forward=times[3 * stage],
            backward=times[3 * stage + 1] + times[3 * stage + 2],
            input_grad=times[3 * stage + 1],
            weight_grad=times[3 * stage + 2],
            activation=problem.activation[stage],
            kept_after_input_grad=problem.kept[stage],
        )
        for stage in range(problem.num_stages)
    ]


def _letters(problem: Problem, schedule: Schedule) -> Letters | None:
    """The schedule's orders as letters; None if it has several pipelines, other micro-batches or other ops."""
    placement = schedule.placement
    if len(placement.pipelines) != 1:
        return None
    stages = placement.pipelines[0].stages
    if len(placement.pipelines[0].microbatches) != problem.num_microbatches:
        return None
    place = {stage: 3 * i for i, stage in enumerate(stages)}  # stages in forward order are numbered like the problem's
    if any(action.op not in LETTERS_OF_OP for _, action in schedule.actions()):
        return None
    return tuple(
        tuple(place[action.stage] + kind for action in order for kind in LETTERS_OF_OP[action.op])
        for order in schedule.orders
    )

"""Orders that a function gives: sizes -> a row of actions for each rank."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.files.order_file import orders_from_rows
from diffusionpipe.timing.legal import check

Orders: TypeAlias = Callable[[int, int], Schedule | Iterable[str | Iterable[str]]]
"""A user's function: (ranks, microbatches) -> a row of actions for each rank, such as ["0F0", "0B0"] or "0F0 0B0";
or a `Schedule`."""


def own_orders(
    function: Orders, name: str, num_workers: int, num_microbatches: int, microbatch_size: int = 1
) -> Schedule:
    """The legal schedule of these sizes that a user's function returns, under the name `name`.

    Raises:
        ConfigError: the function returned something else, or orders of other sizes.
        ScheduleError: the orders are illegal; every problem is named, of rows with rank and position.
    """
    returned = function(num_workers, num_microbatches)
    if isinstance(returned, Schedule):
        check(returned)
        found = replace(returned, name=name)
    else:
        found = orders_from_rows(_rows(returned, name), name=name)
    problems = [
        f"{name}({num_workers}, {num_microbatches}) returned orders for {has} {what}; return a row for each rank, "
        "in which each micro-batch occurs"
        for has, wanted, what in (
            (found.num_workers, num_workers, "ranks"),
            (found.num_microbatches(), num_microbatches, "micro-batches"),
        )
        if has != wanted
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return _sized(found, microbatch_size)


def _sized(schedule: Schedule, size: int) -> Schedule:
    """The schedule with `size` samples in every micro-batch."""
    placement = schedule.placement
    pipelines = tuple(replace(one, microbatches=(size,) * len(one.microbatches)) for one in placement.pipelines)
    return replace(schedule, placement=replace(placement, pipelines=pipelines))


def _rows(returned: Iterable[str | Iterable[str]], name: str) -> list[list[str]]:
    """For each rank, the texts of its actions, from what a user's function has returned.

    Raises:
        ConfigError: that is not a row of actions for each rank. `name`: of the function, for the error.
    """
    wrong = ConfigError(f'{name} must return a row of actions for each rank, such as [["0F0", "0B0"], ["1F0", "1B0"]]')
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise wrong
    rows = []
    for row in returned:
        if not isinstance(row, Iterable):
            raise wrong
        rows.append(row.split() if isinstance(row, str) else [str(action) for action in row])
    return rows


def name_of(function: Orders) -> str:
    """The function's own name, or the name of its class if it has none."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name

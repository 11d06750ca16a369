"""`dp.schedule`: a published family, a file of orders, or a function's own orders."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules import generator_of
from diffusionpipe.schedules.files.order_file import is_order_file, orders_from_rows, read_orders
from diffusionpipe.timing.legal import check

Orders: TypeAlias = Callable[[int, int], Schedule | Iterable[str | Iterable[str]]]
"""(ranks, microbatches) -> a row of actions for each rank, such as ["0F0", "0B0"] or "0F0 0B0"; or a `Schedule`."""


def schedule(
    source: str | os.PathLike[str] | Orders, *, ranks: int | None = None, microbatches: int | None = None
) -> Schedule:
    """The legal compute orders of a schedule.

    Args:
        source: the name of a family, such as "1f1b" or "zb-v"; the path of a .csv, .json or .rules file
            (docs/orders.md); or a function that is called with (ranks, microbatches) and returns a row of actions for
            each rank, written as torch.distributed.pipelining's CSV writes them.
        ranks: ranks of one pipeline, before stages are replicated; None: as many as in the file.
        microbatches: micro-batches of one iteration; None: as many as in the file.

    Raises:
        ConfigError: there is no such family or file, a size is missing, or the source cannot do these sizes.
        ScheduleError: the orders are illegal; names every problem with its rank and position, or its place in the file.
    """
    for name, size in (("ranks", ranks), ("microbatches", microbatches)):
        if size is not None and size < 1:
            raise ConfigError(f"{name}={size}: give a number of at least 1")
    if isinstance(source, os.PathLike) or (isinstance(source, str) and is_order_file(source)):
        return read_orders(Path(source), ranks, microbatches, names=("ranks", "microbatches"))
    if not isinstance(source, str) and not callable(source):
        raise ConfigError(
            f"a schedule is the name of a family, a file or a function, and no {type(source).__name__}; "
            'give e.g. "1f1b", "orders.csv" or f(ranks, microbatches)'
        )
    generate = generator_of(source) if isinstance(source, str) else None
    if ranks is None or microbatches is None:
        name = source if isinstance(source, str) else _name_of(source)
        raise ConfigError(f"the schedule {name!r} suits any sizes; give ranks= and microbatches=")
    if generate is not None:
        return generate(ranks, microbatches)
    assert not isinstance(source, str)
    return _own_orders(source, ranks, microbatches)


def _own_orders(function: Orders, ranks: int, microbatches: int) -> Schedule:
    name = _name_of(function)
    returned = function(ranks, microbatches)
    if isinstance(returned, Schedule):
        check(returned)
        found = replace(returned, name=name)
    else:
        found = orders_from_rows(_rows(returned, name), name=name)
    problems = [
        f"{name}({ranks}, {microbatches}) returned orders for {has} {what}; return a row for each rank, in which each "
        "micro-batch occurs"
        for has, wanted, what in (
            (found.num_workers, ranks, "ranks"),
            (found.num_microbatches(), microbatches, "micro-batches"),
        )
        if has != wanted
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _rows(returned: Iterable[str | Iterable[str]], name: str) -> list[list[str]]:
    """A list of the actions' texts for each rank."""
    wrong = ConfigError(f'{name} must return a row of actions for each rank, such as [["0F0", "0B0"], ["1F0", "1B0"]]')
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise wrong
    rows = []
    for row in returned:
        if not isinstance(row, Iterable):
            raise wrong
        rows.append(row.split() if isinstance(row, str) else [str(action) for action in row])
    return rows


def _name_of(function: Orders) -> str:
    return getattr(function, "__name__", type(function).__name__)

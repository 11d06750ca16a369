"""`dp.schedule`: a published family, a file of orders, or a function's own orders."""

import os
from numbers import Integral
from pathlib import Path

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules import generator_of
from diffusionpipe.schedules.files.order_file import is_order_file, read_orders
from diffusionpipe.schedules.files.own_orders import Orders, name_of, own_orders


def schedule(
    source: str | os.PathLike[str] | Orders, *, ranks: int | None = None, microbatches: int | None = None
) -> Schedule:
    """A schedule with the legal compute orders of a family, a file or a function.

    Args:
        source: the name of a family, such as "1f1b" or "zb-v"; the path of a .csv, .json or .rules file
            (docs/orders.md); or a function that is called with (ranks, microbatches) and returns a row of actions for
            each rank, written as torch.distributed.pipelining's CSV writes them.
        ranks: ranks of one pipeline, before stages are replicated; None: as many as in the file.
        microbatches: micro-batches of one iteration; None: as many as in the file.

    Raises:
        ConfigError: there is no such family or file, a size is missing, or the source cannot do these sizes.
        ScheduleError: the orders are illegal; names every problem with its rank and position, or its place in the file.

    >>> gpipe = lambda ranks, count: [[f"{r}{op}{i}" for op in "FB" for i in range(count)] for r in range(ranks)]
    >>> [len(schedule(source, ranks=2, microbatches=3).orders[1]) for source in (gpipe, "zb-h1")]
    [6, 9]
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and is_order_file(source)):
        return read_orders(Path(source), ranks, microbatches, names=("ranks", "microbatches"))
    if not isinstance(source, str) and not callable(source):
        raise ConfigError(
            f"a schedule is the name of a family, a file or a function, and no {type(source).__name__}; "
            'give e.g. "1f1b", "orders.csv" or f(ranks, microbatches)'
        )
    generate = generator_of(source) if isinstance(source, str) else None
    if ranks is None or microbatches is None:
        name = source if isinstance(source, str) else name_of(source)
        raise ConfigError(f"the schedule {name!r} suits any sizes; give ranks= and microbatches=")
    if generate is not None:
        return generate(ranks, microbatches)
    assert not isinstance(source, str)
    return own_orders(source, name_of(source), ranks, microbatches)


MOST = 1_000_000
"""The largest number of samples, ranks or micro-batches that is accepted: far more than anybody trains with."""


def check_sizes(**sizes: object) -> None:
    """Check that each size, by its name, is a whole number from 1 to `MOST`, or None, which means "not given".

    Raises:
        ConfigError: it names each size that is not.
    """
    wrong = [
        f"{name}={size!r}"
        for name, size in sizes.items()
        if size is not None and (not isinstance(size, Integral) or isinstance(size, bool) or int(size) > MOST)
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: give a whole number from 1 to {MOST:,}")
    if wrong := [f"{name}={size}" for name, size in sizes.items() if isinstance(size, Integral) and int(size) < 1]:
        raise ConfigError(f"{', '.join(wrong)}: give a number of at least 1")

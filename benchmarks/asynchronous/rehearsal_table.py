"""The rehearsed windows as a table."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.asynchronous.rehearsal import FLUSHED, Rehearsal
from benchmarks.tables import table

COLUMNS = (
    "system",
    "ranks",
    "m",
    "ideal ms",
    "simulated ms",
    "measured ms",
    "error",
    "idle",
    "times as fast",
    "part of the limit",
)


def table_of(found: Sequence[Rehearsal]) -> Table:
    """A row for each system at each size."""
    made = table("Rehearsed steps", COLUMNS, num_left=1)
    for one in found:
        for system in one.systems:
            speedup = one.speedup(system.name)
            is_flushed = system.name == FLUSHED
            made.add_row(
                system.name,
                str(one.ranks),
                str(one.microbatches),
                *(f"{1e3 * seconds:.1f}" for seconds in (system.ideal, system.simulated, median(system.seconds))),
                f"{system.error:+.2%}",
                f"{system.idle:.2%}",
                "" if is_flushed else str(speedup),
                "" if is_flushed else f"{speedup.median / one.limit:.3f}",
            )
    return made

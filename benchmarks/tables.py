"""Tables of the benchmarks."""

from collections.abc import Sequence

from rich.table import Table


def table(title: str, columns: Sequence[str], *, num_left: int = 0) -> Table:
    """An empty table; the first columns are words, all others figures."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < num_left else "right")
    return made

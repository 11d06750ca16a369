"""The table of all settings, beside the flushed run of the same samples."""

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from benchmarks.asynchronous.periods import flushed_period, period, time_of
from benchmarks.asynchronous.settings import TABLES, Setting
from benchmarks.asynchronous.training import Outcome
from benchmarks.tables import table

SLACK = 1.01
"""A run is as good as the flushed one at its end where its loss is at most this many times as large."""
COLUMNS = (
    "setting",
    "age by stage",
    "seeds",
    "loss",
    "against flushed",
    "worst",
    "recognised",
    "period",
    "time",
    "1 %",
)


def tables_of(found: Sequence[Outcome], steps: int) -> tuple[Table, ...]:
    """Those that have runs."""
    tables = (_table_of(title, settings, found, steps) for title, settings in TABLES.items())
    return tuple(made for made in tables if made.row_count)


def _table_of(title: str, settings: Sequence[Setting], found: Sequence[Outcome], steps: int) -> Table:
    """A row for each setting that has runs; figures are means over the seeds that the flushed run has too."""
    made = table(title, COLUMNS, num_left=2)
    flushed = {one.seed: one for one in found if one.setting == settings[0].name}
    for setting in settings:
        own = [one for one in found if one.setting == setting.name and one.seed in flushed]
        if own:
            made.add_row(*_cells(setting, own, flushed, steps))
    return made


def _cells(setting: Setting, own: list[Outcome], flushed: dict[int, Outcome], steps: int) -> tuple[str, ...]:
    ratios = [one.loss / flushed[one.seed].loss for one in own]
    reached = [time_to(setting, one, flushed[one.seed].curve[-1][1], steps) for one in own]
    near = [time_to(setting, one, SLACK * flushed[one.seed].curve[-1][1], steps) for one in own]
    return (
        setting.name,
        " ".join(f"{age:g}" for age in own[0].ages),
        str(len(own)),
        f"{fmean(one.loss for one in own):.4f}",
        f"{fmean(ratios) - 1:+.1%}",
        f"{max(ratios) - 1:+.1%}",
        f"{fmean(one.recognised for one in own):.1%}",
        f"{float(period(setting) / flushed_period()):.3f}",
        _mean_time(reached),
        _mean_time(near),
    )


def _mean_time(times: list[float | None]) -> str:
    there = [time for time in times if time is not None]
    return f"{fmean(there):.0f}" if len(there) == len(times) else f"{len(there)} of {len(times)}"


def time_to(setting: Setting, outcome: Outcome, loss: float, steps: int) -> float | None:
    """When a run's loss is first so low, in steps of the flushed pipeline; None: never, or before the curve begins."""
    made = next((made for made, value in outcome.curve if value <= loss), None)
    return None if made is None else float(time_of(setting, made, steps))

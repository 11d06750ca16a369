"""The table of `diffusionpipe plan` as text that fits the terminal: one or two lines for each layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner.choosing.rows import GIB, in_host_memory, parts_of, unit_of

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.explain import Comparison
    from diffusionpipe.planner.choosing.rows import Row
    from diffusionpipe.planner.pricing.setting import Setting

MOST_SIMULATED = 8
"""The most rows of layouts simulated in full that the table shows: a search often simulates dozens."""

Line = tuple[str, str]
"""A line of text and its style for rich, "" or e.g. "bold"."""
LEAST_LAYOUT = 30
"""Columns that a layout's name and sizes should have; the update's time is left out where they would be fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of plans: its head, its term in the glossary, and the function that gives its numbers."""

    head: tuple[str, str]
    """The head of the column, in two lines."""
    term: str
    """The entry of the column in docs/glossary.md."""
    cell: Callable[[Row], float]
    """Gives the column's number for a row."""
    is_percent: bool = False
    """Whether the number is a fraction that is shown in percent."""


STEP = Column(head=("step", "ms"), term="step", cell=lambda row: row.step * 1e3)
UPDATE = Column(head=("update", "ms"), term="update", cell=lambda row: row.update * 1e3)
SAMPLES = Column(head=("samples", "/s"), term="samples/s", cell=lambda row: row.samples_per_second)
IDLE = Column(head=("", "idle"), term="idle", cell=lambda row: row.bubble, is_percent=True)
ENCODING = Column(head=("only en-", "coding"), term="only encoding", cell=lambda row: row.exposed * 1e3)
MEMORY = Column(head=("peak", "GiB"), term="peak GiB", cell=lambda row: row.memory / GIB)
MISSING = Column(head=("missing", "GiB"), term="missing GiB", cell=lambda row: max(0.0, row.overflow / GIB))
COLUMNS = (STEP, UPDATE, SAMPLES, IDLE, ENCODING, MEMORY, MISSING)
GROUPS = (
    "simulated, fastest first",
    "on fewer devices, simulated",
    "estimated (~), fastest first",
    "other systems, estimated (~), fastest first",
    "without a flush, for older weights, simulated; never chosen unless a recipe asks",
)
UNFLUSHED = (
    "step without a flush: the mean time from one batch to the next, the update included   age: by how many steps the "
    "weights that a forward reads are older than its own step's start, in the mean   stashed, delayed, newest, "
    "vertical, predicted: see docs/asynchronous.md"
)
MICROBATCHES = "mb: micro-batches"
WORDS = (
    ("replicas", "(1,2 replicas) or (1,2): devices that share each stage's samples"),
    ("groups", "x N groups or x N: copies of the pipeline, each with a part of the batch"),
    ("side by side", "side by side: copies of one stage are neighbours, so their gradients stay in a node"),
    ("copies", "copies: every device holds all layers and trains a part of the batch"),
    ("accumulated", "accumulated over N: gradient accumulation, N micro-batches on each device"),
    ("buckets", "buckets: parts of a stage whose gradients (sharded: also weights) travel one by one"),
    ("on host", "encoders on host: their weights are kept in host memory and copied layer by layer"),
    ("opposed", "opposed: two backbones in opposite directions over the same devices"),
    ("together", "together: two backbones in the same direction, their micro-batches mixed"),
    ("in turn", "in turn: one backbone after the other on the same devices"),
    ("divided", "divided: each backbone on devices of its own"),
    ("search-", "search-...: an order of forwards and backwards made for this model"),
)
"""Words of layouts, each with its line of the legend."""


def _first(comparison: Comparison) -> tuple[Row, ...]:
    """The layouts simulated in full that are shown: the fastest ones and the plan."""
    rows = comparison.simulated
    # The plan may be slower than the fastest ones, where these do not fit.
    return tuple(row for place, row in enumerate(rows) if place < MOST_SIMULATED or row is comparison.winner)


def table_lines(
    setting: Setting, comparison: Comparison, *, width: int, versions: Versions = Versions.FLUSHED
) -> Iterator[Line]:
    """The lines of the long screen of a plan, each with its style: a table of all layouts, a legend, and remarks.

    They have at most `width` columns where that is at least 72, but for commands. `versions`: the kind that the recipe
    asks for.
    """
    workload, cluster = setting.workload, setting.cluster
    yield f"batch {workload.batch} on {cluster.name}, {cluster.num_ranks} devices", "bold"
    simulated = _first(comparison)
    groups = [simulated, comparison.fewer, comparison.estimated, comparison.others, comparison.unflushed]
    rows = [row for group in groups for row in group]
    columns = _columns(rows, width, knows_update=setting.profile.update > 0)
    texts = [_texts(column, rows) for column in columns]
    widths = [max(map(len, (*column.head, *own))) for column, own in zip(columns, texts, strict=True)]
    widest = max(len(_layout(row)) for row in rows) + 2
    room = min(widest, width - sum(widths) - 2 * len(widths))
    for part in (0, 1):
        heads = [column.head[part].rjust(size) for column, size in zip(columns, widths, strict=True)]
        yield "  ".join([("layout" if part else "").ljust(room), *heads]).rstrip(), "bold"
    cells, is_short = iter(zip(*texts, strict=True)), room < widest
    for name, group in zip(GROUPS, groups, strict=True):
        if group:
            yield name, "italic"
        for row in group:
            is_winner = row is comparison.winner
            figures = [cell.rjust(size) for cell, size in zip(next(cells), widths, strict=True)]
            style = "bold green" if is_winner else "dim" if group is comparison.others else ""
            for number, layout in enumerate(wrapped(_layout(row, is_short=is_short), room, is_winner=is_winner)):
                yield "  ".join([layout.ljust(room), *(figures if not number else ())]).rstrip(), style
        if group is simulated and (left := len(comparison.simulated) - len(simulated)):
            yield f"  {left} more, slower or too large", "dim"
    yield "", ""
    for text in _legend(setting, comparison, columns, is_short=is_short):
        yield from ((line, "dim") for line in wrap(text, width, subsequent_indent="  ", break_on_hyphens=False))
    told = [(text, "") for text in (_memory(setting, comparison.winner), *_tried(comparison), comparison.verdict)]
    told += [(remark.text, remark.way) for remark in comparison.remarks]
    told += [(text, "") for text in _asking(comparison, versions)]
    for text, way in told:
        yield "", ""
        yield from ((line, "") for line in wrap(text, width, break_on_hyphens=False, break_long_words=False))
        if way:  # in one line, so that it can be copied
            yield f"  {way}", ""


def _columns(rows: Sequence[Row], width: int, *, knows_update: bool) -> list[Column]:
    """The columns of the table: "missing" only where a row does not fit, the update's time only if it is known.

    The update's time is also left out where layouts would get fewer than `LEAST_LAYOUT` columns of `width`.
    """
    columns = [column for column in COLUMNS if column is not MISSING or not all(row.fits for row in rows)]
    taken = sum(2 + max(map(len, (*one.head, *_texts(one, rows)))) for one in columns)
    if not knows_update or width - taken < LEAST_LAYOUT:
        columns.remove(UPDATE)
    return columns


def _texts(column: Column, rows: Sequence[Row]) -> list[str]:
    """The texts of a column's cells, all with the same number of decimals; 0 missing GiB is left blank."""
    values = [column.cell(row) for row in rows]
    if column.is_percent:
        return [f"{value:.1%}" for value in values]
    decimals = 1 if column in (MEMORY, MISSING) else decimals_of(values)
    texts = [f"{value:.{decimals}f}" for value in values]
    if column is MISSING:
        return ["" if row.fits else text for text, row in zip(texts, rows, strict=True)]
    return [f"~{text}" if column is STEP and not row.use else text for text, row in zip(texts, rows, strict=True)]


def decimals_of(values: Sequence[float]) -> int:
    """The number of decimals, from 0 to 3, with which the largest value shows at least four digits where possible."""
    largest = max(values, default=0.0)
    return next((decimals for decimals, least in ((0, 1e4), (1, 100), (2, 10)) if largest >= least), 3)


def _layout(row: Row, *, is_short: bool = False) -> str:
    """The name and sizes of a row's layout in words; `is_short`: the sizes in fewer words."""
    return f"{row.name}, {shortened(row.sizes) if is_short else row.sizes}"


def shortened(sizes: str) -> str:
    """The sizes of a layout in fewer words, for narrow tables: "mb" for micro-batches."""
    return sizes.replace(" replicas)", ")").replace(" groups", "").replace(" micro-batches", " mb")


def wrapped(layout: str, room: int, *, is_winner: bool) -> list[str]:
    """The text of a layout in lines of at most `room` columns, with ">" if it is the plan.

    No line breaks between a number and its word.
    """
    mark = "> " if is_winner else "  "
    # A number stays with the word after it, and "x" with the number after it, but "2 x" may be broken.
    tied = re.sub(r"(\d) (?=[a-z])(?!x )|(?<=x) (?=\d)", lambda found: f"{found[1] or ''}\xa0", layout)
    lines = wrap(tied, max(room, 16), initial_indent=mark, subsequent_indent="    ", break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _legend(setting: Setting, comparison: Comparison, columns: Sequence[Column], *, is_short: bool) -> Iterator[str]:
    """The lines of the legend: marks, columns and words of layouts that the table has, each with its meaning."""
    rows = (*comparison.ours, *comparison.fewer, *comparison.others, *comparison.unflushed)
    update = " and the update after it" if setting.profile.update else "; the profile has no update time"
    yield ">: the plan   ~: estimated, not simulated in full"
    yield f"step: an iteration{update}"
    yield "idle: share of all devices' time   only encoding: ms in which only the encoders run"
    missing = "   missing: memory that it lacks" if MISSING in columns else ""
    yield f"peak: memory of the fullest device{missing}"
    if is_short and any("micro-batches" in _layout(row) for row in rows):
        yield MICROBATCHES
    yield from (text for word, text in WORDS if any(word in _layout(row) for row in rows))
    if comparison.unflushed:
        yield UNFLUSHED


def _asking(comparison: Comparison, versions: Versions) -> Iterator[str]:
    """A sentence on the keys with which a recipe trains as the fastest row without a flush, and on its gain.

    No sentence where the plan is as fast. For a recipe that trains without a flush already: the sizes to give it.
    """
    if versions is not Versions.FLUSHED:
        yield _sizes_for(comparison, versions)
        return
    best = next((row for row in comparison.unflushed if row.fits), None)
    if best is not None and best.step < comparison.winner.step:
        times = comparison.winner.step / best.step
        yield (
            f"Without a flush a step would be {times:.2f} times as fast, with older weights: {best.name}, "
            f"{best.sizes}. To train so, give a recipe these sizes, "
            f'pipeline.versions = "{best.name}" and training.clip = "block".'
        )


def _sizes_for(comparison: Comparison, versions: Versions) -> str:
    """A sentence on the first row without a flush with the recipe's kind of weights: its sizes, and its gain or lack.

    If there is no such row, it says so.
    """
    begin = f'The recipe trains without a flush (pipeline.versions = "{versions}"), and a plan has one: '
    row = next((row for row in comparison.unflushed if row.name == versions), None)
    if row is None:
        return (
            f"{begin}this table has no row without a flush and with such weights: no sizes that were tried have them."
        )
    if not row.fits:
        return f"{begin}the best sizes without one, {row.sizes}, need {row.overflow / GIB:.1f} GiB more than there is."
    times = comparison.winner.step / row.step
    return f"{begin}give it the sizes of its row, {row.sizes}; a step is {times:.2f} times as fast as the plan's."


def _tried(comparison: Comparison) -> Iterator[str]:
    """A line with the numbers of layouts that the search estimated and simulated; none if they are not recorded."""
    if tried := comparison.tried:
        yield (
            f"layouts estimated: {tried.estimated:,}; simulated in full: {tried.simulated}, of which "
            f"{tried.fitting} {'fits' if tried.fitting == 1 else 'fit'} in memory"
        )


def _memory(setting: Setting, winner: Row) -> str:
    """A line with all parts of the fullest device's memory, their total, and the memory that devices have."""
    assert winner.use, "the winner is simulated in full"
    name, unit = unit_of(winner.use.total)
    parts = ", ".join(f"{part} {size:.2f}" for part, size in parts_of(winner.use, unit).items())
    room = sorted({device.memory for device in setting.cluster.devices})
    limits = " or ".join(f"{memory / unit:.2f}" for memory in room)
    return f"fullest device, {name}: {parts}; together {winner.use.total / unit:.2f} of {limits}" + in_host_memory(
        setting
    )

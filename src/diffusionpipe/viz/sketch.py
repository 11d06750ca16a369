"""Timelines as text: one row per worker, time to the right; long ones in several bands, one below the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd

from diffusionpipe.ir import COMPUTE_OPS, Action, Op, Span, Timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz.gantt import UNITS, TimeAxis
from diffusionpipe.viz.places import PROBE, is_later, places_of_stages

_IDLE, _GOES_ON, _FROZEN, _PROBE = ".", "-", "E", "P"
_SHOWN = COMPUTE_OPS | {Op.ENCODE}
_LINES = 48
"""The most lines of all bands together; with more, only three bands are shown. Up to three bands are always shown."""
_FEWEST_BANDS, _MOST_BANDS = 3, 6
_MOST_CUT = 1e9
"""The most bands into which a timeline is cut, for times that differ by hundreds of orders of magnitude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A timeline drawn as text, and the facts that its legend must explain."""

    text: str
    ops: frozenset[Op]
    """The ops of the actions in the sketch."""
    has_stages: bool
    """Whether stages are written before the letters."""
    has_small_letters: bool
    """Whether small letters are the second half of each worker's stages."""
    has_bare_letters: bool
    """Whether some action is too short for its number."""
    has_probes: bool
    """Whether forwards without gradients have a letter of their own."""
    is_excerpt: bool
    """Whether only start, middle and end are shown."""


def sketch(timeline: Timeline, *, width: int = 120, axis: TimeAxis = UNITS) -> str:
    """The picture of a timeline as text, at most `width` columns wide (but never under 24).

    Computation only, with the numbers of the micro-batches; a dot is an idle unit of time. Where all times are
    multiples of a unit (1, or a simple fraction), every unit of time has the same cell, so the picture is exact, unless
    it would be longer for that; else time is rounded to columns. A picture that is wider than `width` is cut into bands
    of equal time, each under a line that says its time in the unit of `axis`. Where even that would be long, the first,
    the middle and the last band are shown. Where a worker has several stages, the stage comes before the letter, as in
    the text form of actions. Where there is no room for that and a worker has two, the second one's letters are small:
    it is the second direction or chunk. E3 is fill 3, frozen work; several in a row, too short to be told apart, are
    one E.

    >>> from diffusionpipe.schedules import one_f_one_b
    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> schedule = one_f_one_b(3, 3)
    >>> timeline = simulate(schedule, uniform_costs(schedule))
    >>> print(sketch(timeline))
    0 | F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---
    1 | .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .
    2 | .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .
    >>> print(sketch(timeline, width=26))
    time 0 to 8
    0 | F0F1F2. . . . B0
    1 | . F0F1. . B0- F2
    2 | . . F0B0- F1B1-
    time 8 to 15
    0 | - . B1- . B2-
    1 | B1- . B2- . .
    2 | F2B2- . . . .
    """
    return draw_sketch(timeline, width=width, axis=axis).text


def draw_sketch(timeline: Timeline, *, width: int = 120, axis: TimeAxis = UNITS) -> Sketch:
    """A timeline drawn as text, as `sketch` draws it, with the facts that a legend must explain."""
    margin = len(str(max(0, timeline.num_workers - 1)))
    columns = max(width, 24) - margin - 3
    grid = _grid(timeline.spans, columns)
    num_bands = max(1, ceil(grid.num_cells / grid.per_band))
    # A band has a line for each worker, and a heading.
    allowed = min(_MOST_BANDS, max(_FEWEST_BANDS, _LINES // (timeline.num_workers + 1)))
    is_excerpt = num_bands > allowed
    canvas = _Canvas(grid, timeline.num_workers)
    lines: list[str] = []
    bands = [0, num_bands // 2, num_bands - 1] if is_excerpt else range(num_bands)
    for band in bands:
        start, stop = band * grid.per_band, min((band + 1) * grid.per_band, grid.num_cells)
        if num_bands > 1:
            lines.append(_heading(start * grid.unit, stop * grid.unit, axis))
        rows = canvas.rows(start, stop)
        lines += [f"{worker:{margin}} | {row}".rstrip() for worker, row in enumerate(rows)]
    return Sketch(
        text="\n".join(lines),
        ops=frozenset(bar.op for bar in grid.bars),
        has_stages=grid.form.has_stages,
        has_small_letters=grid.form.has_small_letters,
        has_bare_letters=canvas.has_bare_letters,
        has_probes=any(bar.label.startswith(_PROBE) for bar in grid.bars),
        is_excerpt=is_excerpt,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A bar of the sketch: one span, or several spans of frozen work joined."""

    worker: int
    op: Op
    stage: int
    label: str
    """The op's letter and the number of the micro-batch or fill: "F3"."""
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A way to write the labels of all bars."""

    labels: tuple[str, ...]
    """The label of each bar."""
    letters: tuple[str, ...]
    """The shorter label of each bar, for bars that are too short for their labels."""
    has_stages: bool = False
    """Whether labels begin with the stage."""
    has_small_letters: bool = False
    """Whether small letters mark the second stage of a worker."""

    @property
    def longest(self) -> int:
        """The number of columns of the longest label."""
        return max(map(len, self.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    bars: tuple[_Bar, ...]
    form: _Form
    unit: Seconds | Fraction
    """The time that one cell shows."""
    num_cells: int
    cell: int
    """The number of columns of one cell."""
    per_band: int
    """The number of cells of one band."""


def _grid(spans: Sequence[Span], columns: int) -> _Grid:
    """The grid of the spans, at most `columns` wide, with the fewest bands.

    Of equal ones it is the first of these: exact with a blank after labels, exact without it, rounded.
    """
    places = places_of_stages(spans)
    bars = [
        _Bar(
            worker=span.worker,
            op=span.action.op,
            stage=span.action.stage,
            label=_label(span.action, is_probe=places.get(span.action.stage) == PROBE),
            start=span.start,
            end=span.end,
        )
        for span in spans
        if span.action.op in _SHOWN and span.end > span.start
    ]
    if not bars:
        return _Grid(bars=(), form=_Form(labels=(), letters=()), unit=1, num_cells=0, cell=1, per_band=columns)
    grids = _grids(bars, places, columns)
    return min(grids, key=lambda grid: ceil(grid.num_cells / grid.per_band))


def _grids(bars: list[_Bar], places: Mapping[int, tuple[int, int]], columns: int) -> Iterator[_Grid]:
    end = max(bar.end for bar in bars)
    forms = _forms(bars, places)
    if unit := _unit(bars):
        narrow = [] if forms[-1].has_stages else [(forms[-1], 0)]  # "F0F1" can be read, "10F110F2" cannot
        for form, gap in [*((form, 1) for form in forms), *narrow]:
            cell = form.longest + gap
            num_cells = round(end / unit)
            num_bands = ceil(num_cells / max(1, columns // cell))
            yield _Grid(
                bars=tuple(bars),
                form=form,
                unit=unit,
                num_cells=num_cells,
                cell=cell,
                per_band=ceil(num_cells / num_bands),  # bands of equal length
            )
    joined = _joined(bars, end / columns)
    for form in _forms(joined, places):
        # Whole bands may come out a little larger by rounding.
        num_bands = ceil(min(end / _legible_unit(joined, form) / columns, _MOST_CUT) - 1e-9)
        yield _Grid(
            bars=tuple(joined),
            form=form,
            unit=end / (num_bands * columns),
            num_cells=num_bands * columns,
            cell=1,
            per_band=columns,
        )


def _legible_unit(bars: list[_Bar], form: _Form) -> Seconds:
    """The time that one column may show so that all computations but very short ones have room for label and blank."""
    pairs = list(zip(bars, form.labels, strict=True))
    timed = [pair for pair in pairs if pair[0].op is not Op.ENCODE] or pairs
    more = 2 if form.has_stages else 1  # "0F01F0" cannot be read, so that a blank must be left after rounding
    rooms = sorted((bar.end - bar.start) / (len(text) + more) for bar, text in timed)
    # The room in the shortest one, but at least a third of the room in all but the shortest tenth.
    return max(rooms[0], rooms[len(rooms) // 10] / 3)


def _joined(bars: list[_Bar], least: Seconds) -> list[_Bar]:
    """The bars, with frozen work joined to the frozen work before it on its worker if the gap is below `least`."""
    found: list[_Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.worker, bar.start, bar.end)):
        last = found[-1] if found else None
        is_more = last is not None and last.worker == bar.worker and last.op is bar.op is Op.ENCODE
        if last is not None and is_more and bar.start - last.end < least:
            found[-1] = replace(last, label=_FROZEN, end=bar.end)
        else:
            found.append(bar)
    return found


def _forms(bars: list[_Bar], places: Mapping[int, tuple[int, int]]) -> list[_Form]:
    """The ways in which the labels of the bars can be written, the longest first; `places`: stage -> its place."""
    most = max((num for _, num in places.values()), default=1)
    plain = tuple(bar.label for bar in bars)
    letters = tuple(text[0] for text in plain)
    if most == 1:
        return [_Form(labels=plain, letters=letters)]
    numbered = tuple(bar.label if bar.op is Op.ENCODE else f"{bar.stage}{bar.label}" for bar in bars)
    forms = [_Form(labels=numbered, letters=letters, has_stages=True)]
    if most == 2:
        is_small = [is_later(*places.get(bar.stage, (0, 1))) for bar in bars]
        cased = tuple(text.lower() if small else text for text, small in zip(plain, is_small, strict=True))
        forms.append(_Form(labels=cased, letters=tuple(text[0] for text in cased), has_small_letters=True))
    return forms


def _unit(bars: list[_Bar]) -> Fraction:
    """The greatest time of which all starts and ends are multiples, of the form n/1, n/2, n/4, n/5 or n/10; else 0."""
    times = [float(time) for bar in bars for time in (bar.start, bar.end)]
    for scale in (1, 2, 4, 5, 10):
        whole = [round(time * scale) for time in times]
        if all(abs(time * scale - number) < 1e-9 for time, number in zip(times, whole, strict=True)):
            return Fraction(gcd(*whole), scale)
    return Fraction(0)


def _label(action: Action, *, is_probe: bool) -> str:
    if action.op is Op.ENCODE:
        return f"{_FROZEN}{action.slot}"
    if is_probe:
        return f"{_PROBE}{action.microbatch}"
    return f"{action.op.value}{action.microbatch}"


def _heading(start: Seconds | Fraction, stop: Seconds | Fraction, axis: TimeAxis) -> str:
    first, last = (axis.text(float(time)) for time in (start, stop))
    return f"time {first} to {last}" + (f" {axis.name}" if axis != UNITS else "")


class _Canvas:
    """Draws bands of a grid, and notes which labels had no room."""

    def __init__(self, grid: _Grid, num_workers: int) -> None:
        self._grid, self._num_workers = grid, num_workers
        self.has_bare_letters = False

    def rows(self, first: int, last: int) -> list[str]:
        """The text of each worker's row from cell `first` up to but without cell `last`."""
        grid = self._grid
        rows = [[_IDLE.ljust(grid.cell)] * (last - first) for _ in range(self._num_workers)]
        for index, bar in enumerate(grid.bars):
            start, stop = round(bar.start / grid.unit), round(bar.end / grid.unit)
            shown = max(start, first), min(stop, last)
            if shown[0] < shown[1]:
                rows[bar.worker][shown[0] - first : shown[1] - first] = self._pieces(index, (start, stop), shown)
        return ["".join(row).rstrip() for row in rows]

    def _pieces(self, index: int, whole: tuple[int, int], shown: tuple[int, int]) -> list[str]:
        """The texts of the cells of a band that show bar number `index`: its label or dashes, and at its end a blank.

        `whole`, `shown`: the first cell and the end of the bar, and of its part in the band.
        """
        grid, form = self._grid, self._grid.form
        length = (shown[1] - shown[0]) * grid.cell
        label, letter = form.labels[index], form.letters[index]
        parts = self._parts(*whole)
        home = next((part for part in parts if (part[1] - part[0]) * grid.cell >= len(label)), None)  # the first
        if home is None:
            home, label = max(parts, key=lambda part: part[1] - part[0]), letter
            self.has_bare_letters = self.has_bare_letters or len(form.labels[index]) > 1
        text = label if shown == home else ""
        is_end = shown[1] == whole[1]
        # The last column of a bar stays blank, so that two bars never touch.
        text = text.ljust(length - is_end, _GOES_ON).ljust(length)
        return [text[i : i + grid.cell] for i in range(0, length, grid.cell)]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(first cell, end) of a bar's parts in its first, second and last band; all between are like the second."""
        per_band = self._grid.per_band
        second = min((start // per_band + 1) * per_band, stop)
        third, last = min(second + per_band, stop), max(second, (stop - 1) // per_band * per_band)
        parts = [(start, second), (second, third), (max(third, last), stop)]
        return [part for part in parts if part[0] < part[1]]

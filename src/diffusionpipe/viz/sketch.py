"""Timelines as text: one row per worker, time to the right."""

from dataclasses import dataclass
from math import gcd

from diffusionpipe.ir import COMPUTE_OPS, Action, Op, Span, Timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz.places import is_later, places_of_stages

_IDLE = "."
_SHOWN = COMPUTE_OPS | {Op.ENCODE}


def sketch(timeline: Timeline, *, width: int = 120) -> str:
    """The picture of a timeline as text, at most `width` columns wide (but never under 20).

    Computation only; a dot is an idle unit of time. Where all times are integers and the picture fits, every unit of
    time has the same cell, so the picture is exact; else time is rounded to columns. A picture that is too small for
    their numbers shows micro-batches 0, 2, 4, ... in capitals and 1, 3, 5, ... in small letters.
    Where a worker has several stages, the stage stands before the letter, as in the text form of actions. Where there
    is no room for that, the first half of each worker's stages has capitals, the other half, which is the second
    direction or chunk, small letters.
    E3 is fill 3, frozen work.

    >>> from diffusionpipe.schedules import one_f_one_b
    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> schedule = one_f_one_b(3, 3)
    >>> timeline = simulate(schedule, uniform_costs(schedule))
    >>> print(sketch(timeline))
    0 | F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---
    1 | .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .
    2 | .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .
    >>> print(sketch(timeline, width=20))
    0 | FfF....BB.bb.BB
    1 | .Ff..BBFbb.BB..
    2 | ..FBBfbbFBB....
    """
    spans = [span for span in timeline.spans if span.action.op in _SHOWN]
    margin = len(str(timeline.num_workers - 1))
    grid = _grid(spans, columns=max(width, 20) - margin - 3)
    rows = [[_IDLE.ljust(grid.cell)] * grid.num_cells for _ in range(timeline.num_workers)]
    for span, label in zip(spans, grid.labels, strict=True):
        start, stop = round(span.start / grid.unit), round(span.end / grid.unit)
        if stop > start:
            rows[span.worker][start:stop] = _pieces(label, stop - start, grid)
    return "\n".join(f"{worker:{margin}} | {''.join(row).rstrip()}".rstrip() for worker, row in enumerate(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    unit: Seconds
    """Time of one cell."""
    num_cells: int
    cell: int
    """Columns of one cell."""
    labels: tuple[str, ...]
    """The text of each span; a letter where there is no room for the numbers of micro-batches."""
    is_labelled: bool


def _grid(spans: list[Span], *, columns: int) -> _Grid:
    """The grid that says most: a blank after each label, none, one letter per unit, or rounded to columns."""
    end = max((span.end for span in spans), default=0)
    if not end:
        return _Grid(unit=1, num_cells=0, cell=1, labels=("",) * len(spans), is_labelled=False)
    *forms, letters = _forms(spans)
    unit = _unit(spans)
    num_cells = round(end / unit) if unit else columns + 1
    for labels, gap in [*((form, 1) for form in forms), (forms[-1], 0)]:
        cell = max(map(len, labels)) + gap
        if num_cells * cell <= columns:
            return _Grid(unit=unit, num_cells=num_cells, cell=cell, labels=labels, is_labelled=True)
    if num_cells <= columns:
        return _Grid(unit=unit, num_cells=num_cells, cell=1, labels=letters, is_labelled=False)
    shortest = min(span.end - span.start for span in spans if span.end > span.start)
    fitting = [form for form in forms if shortest / end * columns >= max(map(len, form)) + 1]
    labels = next(iter(fitting), letters)
    return _Grid(unit=end / columns, num_cells=columns, cell=1, labels=labels, is_labelled=bool(fitting))


def _forms(spans: list[Span]) -> list[tuple[str, ...]]:
    """Each span's text in forms that are shorter and shorter; the last one is a single letter."""
    places = places_of_stages(spans)
    plain = tuple(_label(span.action) for span in spans)
    if max((num for _, num in places.values()), default=1) == 1:
        return [plain, tuple(text[0].lower() if int(text[-1]) % 2 else text[0] for text in plain)]
    stages = ["" if span.action.op is Op.ENCODE else span.action.stage for span in spans]
    is_small = [is_later(*places.get(span.action.stage, (0, 1))) for span in spans]
    cased = tuple(text.lower() if small else text for text, small in zip(plain, is_small, strict=True))
    numbered = tuple(f"{stage}{text}" for stage, text in zip(stages, plain, strict=True))
    return [numbered, cased, tuple(text[0] for text in cased)]


def _unit(spans: list[Span]) -> int:
    """The greatest unit of which all times are multiples; 0 if some time is no integer."""
    times = [time for span in spans for time in (span.start, span.end)]
    if any(time != int(time) for time in times):
        return 0
    return gcd(*(int(time) for time in times))


def _label(action: Action) -> str:
    return f"E{action.slot}" if action.op is Op.ENCODE else f"{action.op.value}{action.microbatch}"


def _pieces(label: str, num_cells: int, grid: _Grid) -> list[str]:
    """The span's text, cut into cells: its label, a line to its end, and where there is room a blank."""
    length = num_cells * grid.cell
    text = label.ljust(length - 1, "-").ljust(length)[:length] if grid.is_labelled else label * length
    return [text[i : i + grid.cell] for i in range(0, length, grid.cell)]

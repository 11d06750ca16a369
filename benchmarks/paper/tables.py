"""The cells as tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.paper.bandwidth import FACTOR, Threshold
from benchmarks.paper.cells import BEST, PIPELINE, UNFILLED, Cell, Entry, SameLayout
from benchmarks.paper.summary import TUNED, speedup_over_best
from benchmarks.rivals.replicated import REPLICATED_SPP
from benchmarks.tables import table

SYSTEMS = ("DDP", "DDP (no overlap)", "ZeRO-3 / FSDP", "GPipe", "1F1B + SPP", REPLICATED_SPP)
WIDTH = 200
GIB = 2**30
SHORT = {
    "DDP": "DDP overlapped",
    "DDP (no overlap)": "DDP after",
    "ZeRO-3 / FSDP": "ZeRO-3",
    REPLICATED_SPP: "SPP, replicas",
    UNFILLED: "pipeline unfilled",
    PIPELINE: "pipeline filled",
    BEST: "best of all",
}


def show(cells: Sequence[Cell], thresholds: Sequence[Threshold], figures: dict[str, float | None]) -> None:
    """Times, layouts, the comparison at equal layouts, bandwidths, and the summary."""
    console = Console(width=WIDTH, highlight=False)
    for model in dict.fromkeys(cell.case.model for cell in cells):
        mine = [cell for cell in cells if cell.case.model == model]
        console.print(_times(model, mine), _tuned(model, mine), _fills(model, mine))
        console.print(_layouts(model, mine), _same(model, mine))
    if thresholds:
        console.print(_bandwidths(thresholds))
    console.print(_summary(figures))
    console.print(
        "Simulated on analytic profiles: no A100 was used. A time with * does not fit in the device's memory."
    )


def _place(cell: Cell) -> tuple[str, str]:
    return str(cell.case.devices), str(cell.case.per_device)


def _times(model: str, cells: Sequence[Cell]) -> Table:
    systems = (*SYSTEMS, UNFILLED, PIPELINE, BEST)
    columns = (
        "A100s",
        "each",
        *(SHORT.get(name, name) for name in systems),
        "pipeline idle",
        "best idle",
        "x best",
        "r",
    )
    made = table(f"{model}: ms of a step, each at its own best sizes", columns)
    for cell in cells:
        entries = [cell.entry(name) for name in systems]
        idle = [_idle(cell.entry(PIPELINE)), _idle(cell.entry(BEST))]
        over = _ratio(speedup_over_best(cell))
        made.add_row(*_place(cell), *map(_time, entries), *idle, over, f"{cell.frozen_over_busy:.2f}")
    return made


def _tuned(model: str, cells: Sequence[Cell]) -> Table:
    """A cache's size and the time to make it are for a million samples."""
    columns = ("A100s", "each", "DDP overlapped", *TUNED.values(), "best of all", "GB a million", "hours a million")
    made = table(f"\n{model}: ms of a step of data parallelism as people tune it (-: one node only)", columns)
    for cell in cells:
        entries = [cell.entry(name) for name in ("DDP", *TUNED.values(), BEST)]
        batch = cell.case.devices * cell.case.per_device
        size, hours = cell.cache.sample_bytes * 1e6 / 1e9, cell.cache.seconds / batch * 1e6 / 3600
        made.add_row(*_place(cell), *map(_time, entries), f"{size:.0f}", f"{hours:.2f}")
    return made


def _fills(model: str, cells: Sequence[Cell]) -> Table:
    columns = ("A100s", "each", "without encoders ms", "bound ms", "filled ms", "over bound", "frozen / idle", "bubble")
    made = table(f"\n{model}: the best pipeline's filling beside its bound", columns)
    for cell in cells:
        if one := cell.fill:
            times = (f"{1e3 * seconds:.1f}" for seconds in (one.unfilled, one.bound, one.iteration))
            made.add_row(
                *_place(cell), *times, f"{one.over_bound:.4f}", f"{one.frozen_over_idle:.2f}", f"{one.bubble:.1%}"
            )
    return made


def _layouts(model: str, cells: Sequence[Cell]) -> Table:
    made = table(f"\n{model}: layouts", ("A100s", "each", "what", "layout", "idle", "GiB beyond memory"), num_left=4)
    for cell in cells:
        for entry in (*cell.ours, *cell.others, *cell.tuned):
            beyond = "" if entry.fits else f"{entry.overflow / GIB:.1f}"
            made.add_row(*_place(cell), entry.system, entry.layout, _idle(entry), beyond)
    return made


def _same(model: str, cells: Sequence[Cell]) -> Table:
    columns = ("A100s", "each", "ours", "filled", "no buckets", "unfilled", "GPipe", "1F1B + SPP", "x", "x no buckets")
    made = table(f"\n{model}: ms of a step with the same ranks, groups and micro-batches", columns)
    made.columns[2].justify = "left"
    for cell in cells:
        for one in cell.same_layout:
            made.add_row(*_place(cell), one.ours.layout, *_same_times(one))
    return made


def _same_times(one: SameLayout) -> list[str]:
    entries = (one.ours, one.unbucketed, one.unfilled, one.gpipe, one.spp)
    return [*map(_time, entries), _ratio(one.speedup), _ratio(one.speedup_unbucketed)]


def _bandwidths(thresholds: Sequence[Threshold]) -> Table:
    title = f"\nBus bandwidth between nodes below which ours is {FACTOR} x overlapped data parallelism"
    made = table(title, ("model", "A100s", "each", "GB/s", "Gb/s"), num_left=1)
    for one in thresholds:
        rate = one.bandwidth
        figures = ("never", "never") if rate is None else (f"{rate / 1e9:.1f}", f"{rate * 8 / 1e9:.0f}")
        made.add_row(one.case.model, str(one.case.devices), str(one.case.per_device), *figures)
    return made


def _summary(figures: dict[str, float | None]) -> Table:
    made = table("\nSummary", ("", ""), num_left=1)
    for name, value in figures.items():
        made.add_row(name, "-" if value is None else f"{value:.4g}")
    return made


def _time(entry: Entry | None) -> str:
    return "-" if entry is None else f"{entry.step * 1e3:.1f}" + ("" if entry.fits else "*")


def _idle(entry: Entry | None) -> str:
    return "-" if entry is None else f"{entry.bubble:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

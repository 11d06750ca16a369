"""The screen of `diffusionpipe profile --operations`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diffusionpipe.cli.text.text_table import text_table
from diffusionpipe.costs.operations import HELD, holding, side_by_side

if TYPE_CHECKING:
    from pathlib import Path

    from diffusionpipe.costs.operations import OperationReport, OperationUse
    from diffusionpipe.viz.operations import DrawnOperation

MOST_ROWS = 20
WIDTH = 100


def operation_lines(report: OperationReport) -> Iterator[str]:
    """The lines of the screen of `profile --operations`: tables of the costly operations and of kinds of operations.

    The last lines say how much faster all operations would be if they ran at the same time.
    """
    total, held = report.seconds, holding(report.uses)
    plural = "s" if report.samples > 1 else ""
    yield (
        f"{report.source} on {report.device}, {report.precision}: {total * 1e3:.2f} ms forward and backward of "
        f"{report.samples} sample{plural}"
    )
    yield f"{len(held)} of {len(report.uses)} lines hold {HELD:.0%} of it:"
    yield ""
    heads = ("layer", "pass", "operation", "calls", "ms", "of all", "GFLOP", "MiB", "of roofline")
    rows = [(_short(use.layer), "B" if use.is_backward else "F", *_cells([use], use.name, total)) for use in held]
    yield from _aligned([heads, *rows[:MOST_ROWS]])
    if len(rows) > MOST_ROWS:
        yield f"and {len(rows) - MOST_ROWS} more, which the file names"
    yield ""
    kinds: dict[str, list[OperationUse]] = defaultdict(list)
    for use in report.uses:
        kinds[use.name].append(use)
    ordered = sorted(kinds.items(), key=lambda kind: -sum(use.seconds for use in kind[1]))
    yield from _aligned([heads[2:], *(_cells(uses, name, total) for name, uses in ordered[:MOST_ROWS])])
    yield ""
    gain = side_by_side(report.uses)
    yield f"Side by side, all operations would be at most {gain:.2f} x as fast, each at the roofline: those that"
    yield "compute would hide those that move bytes. F, B: forward, backward. of roofline: the least time that its"
    peak, bandwidth = report.peak / 1e12, report.bandwidth / 1e9
    yield f"arithmetic ({peak:.3g} TFLOP/s) or bytes ({bandwidth:.3g} GB/s) take, as a part of its time"


def draw_operations(report: OperationReport, path: Path) -> None:
    """Draws the times of the operations beside the roofline as the picture file `path`.

    Raises:
        ConfigError: the file cannot be written.
    """
    from diffusionpipe.viz.operations import operation_chart

    size = f"{report.samples} samples: {report.seconds * 1e3:.1f} ms"
    title = f"{report.source} on {report.device}, {report.precision}, {size}"
    operation_chart(
        title,
        [_drawn(use) for use in holding(report.uses)],
        [_drawn(use) for use in report.uses],
        path,
        peak=report.peak,
        bandwidth=report.bandwidth,
    )


def _drawn(use: OperationUse) -> DrawnOperation:
    from diffusionpipe.viz.operations import DrawnOperation

    return DrawnOperation(
        label=f"{_short(use.layer, 30)}  {use.name}",
        is_backward=use.is_backward,
        seconds=use.seconds,
        flops=use.flops,
        num_bytes=use.num_bytes,
    )


def _cells(uses: Sequence[OperationUse], name: str, total: float) -> tuple[str, ...]:
    seconds = sum(use.seconds for use in uses)
    least = sum(use.least for use in uses)
    figures = sum(use.flops for use in uses) / 1e9, sum(use.num_bytes for use in uses) / 2**20
    share = f"{least / seconds:.0%}" if seconds and least else "-"
    calls = str(sum(use.calls for use in uses))
    return (name, calls, f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}", *(f"{one:.3g}" for one in figures), share)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return text_table(rows, WIDTH)


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"..{name[2 - most :]}"

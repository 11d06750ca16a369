"""What is left of the paper's claims with its encoders' share, with ours, and with faster and slower layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from benchmarks.paper.cells import PIPELINE, UNFILLED, Case, Cell, measure_in, setting_of
from benchmarks.paper.sensitivity import CELLS, MODEL, RATES, SHARES, with_share
from benchmarks.paper.summary import DDP, DDP_AFTER, fitting, speedup_over
from benchmarks.tables import table
from diffusionpipe.planner.choosing.band import stretched
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.viz.pictures import new_figure, save_figure

RECALLED = {8: 0.38, 16: 0.41, 32: 0.43, 64: 0.44}
"""Samples on each device -> the encoders' time over the trained part's in the paper, as recalled, not checked."""
OVER_PIPELINES, OVER_DDP = 1.41, 1.28
"""What the paper reports at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One cell under one assumption; None where one of a pair does not fit."""

    assumption: str
    case: Case
    share: float
    """r: the encoders' time over the trained part's."""
    same_layout: float | None
    """The most over the better of GPipe and 1F1B + SPP on the same ranks of a group and with the same micro-batches;
    ours may have more stages on each rank."""
    over_ddp: float | None
    over_ddp_after: float | None
    bubble_before: float | None
    bubble_after: float | None
    """Of the best pipeline, before and after filling."""


Change = Callable[[Setting], Setting]


def assumptions(case: Case) -> Mapping[str, Change]:
    """Name -> what it makes of the case's setting."""
    shares = {f"paper's share {RECALLED[case.per_device]}": RECALLED[case.per_device]}
    shares |= {f"share {share}": share for share in SHARES}
    found: dict[str, Change] = {"as computed": lambda setting: setting}
    found |= {name: partial(with_share, case=case, share=share) for name, share in shares.items()}
    return found | {f"rates {rate - 1:+.0%}": partial(stretched, factor=1 / rate) for rate in RATES}


def claims() -> Iterator[Claim]:
    """One for each cell and assumption."""
    for devices, per_device in CELLS:
        case = Case(model=MODEL, devices=devices, per_device=per_device)
        for name, change in assumptions(case).items():
            yield claim(name, measure_in(change(setting_of(case)), case))


def claim(assumption: str, cell: Cell) -> Claim:
    """The claims' figures of a cell."""
    before, after = fitting(cell, UNFILLED), fitting(cell, PIPELINE)
    return Claim(
        assumption=assumption,
        case=cell.case,
        share=cell.frozen_over_busy,
        same_layout=max((one.speedup for one in cell.same_layout if one.speedup is not None), default=None),
        over_ddp=speedup_over(cell, DDP),
        over_ddp_after=speedup_over(cell, DDP_AFTER),
        bubble_before=before.bubble if before else None,
        bubble_after=after.bubble if after else None,
    )


def table_of(found: Sequence[Claim]) -> Table:
    """One row for each."""
    columns = ("A100s", "each", "r", "x pipelines", "x DDP", "x DDP after", "bubble before", "bubble after")
    made = table(f"{MODEL}: the paper's claims (1.41 x, 1.28 x, under 5 %)", ("assumption", *columns), num_left=1)
    for one in found:
        ratios = (one.same_layout, one.over_ddp, one.over_ddp_after)
        bubbles = (one.bubble_before, one.bubble_after)
        made.add_row(
            one.assumption, str(one.case.devices), str(one.case.per_device), f"{one.share:.2f}",
            *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            *("-" if bubble is None else f"{bubble:.1%}" for bubble in bubbles),
        )  # fmt: skip
    return made


def draw(found: Sequence[Claim], path: Path) -> None:
    """Both speeds of every cell under every assumption, and the paper's."""
    figure = new_figure(9, 3.8)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    series = {
        "over pipelines, same layout": ("same_layout", OVER_PIPELINES),
        "over overlapped DDP": ("over_ddp", OVER_DDP),
    }
    for color, (label, (field, claimed)) in zip(("tab:orange", "tab:blue"), series.items(), strict=True):
        axes.plot([getattr(one, field) for one in found], "o", color=color, label=label)
        axes.axhline(claimed, color=color, linewidth=0.8, linestyle="--", label=f"the paper's {claimed}")
    axes.axhline(1, color="black", linewidth=0.8)
    names = [f"{one.case.devices} x {one.case.per_device}, {one.assumption}" for one in found]
    axes.set_xticks(range(len(found)), names, rotation=60, ha="right", fontsize=7)
    axes.set_title(f"{MODEL}: speed of our best, simulated", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    save_figure(figure, path)

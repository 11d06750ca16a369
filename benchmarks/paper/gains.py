"""What filling alone gives: the best filled layout of a kind beside the same unfilled, and the best unfilled one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.paper.cells import MODELS, Case, setting_of
from benchmarks.paper.contests import UNITS
from benchmarks.tables import table
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds
from diffusionpipe.viz.pictures import new_figure, save_figure

CELLS = ((8, 8), (8, 64), (64, 8), (64, 64))
"""Devices, and samples of a step on each."""
KINDS = {"pipeline": UNITS, "data parallelism": (1,)}
"""Ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Of one kind of layout in one cell."""

    case: Case
    kind: str
    layout: str
    """The best filled one."""
    filled: Seconds
    same: Seconds
    """The same layout with all encoders first."""
    other: str
    """The best layout with all encoders first,"""
    unfilled: Seconds
    """and its step."""

    @property
    def over_same(self) -> float:
        """What filling gives to this layout."""
        return self.same / self.filled

    @property
    def over_best(self) -> float:
        """What it gives where the unfilled one has its own best sizes."""
        return self.unfilled / self.filled


def gains() -> Iterator[Gain]:
    """One for each model, cell and kind in which something fits."""
    for model in MODELS:
        for devices, per_device in CELLS:
            case = Case(model=model, devices=devices, per_device=per_device)
            for kind in KINDS:
                if found := gain(case, kind):
                    yield found


def gain(case: Case, kind: str) -> Gain | None:
    """Both searches; None where nothing fits. Layouts of either search count for both."""
    setting, units = setting_of(case), KINDS[kind]
    filled = search(setting, filler=filler_of(setting), units=units).winner
    unfilled = search(setting, units=units).winner
    if filled is None or unfilled is None:
        return None
    same = propose(setting, filled[0].layout(setting)).step
    best = min((filled[0], same), (unfilled[0], unfilled[1].step), key=lambda pair: pair[1])
    return Gain(
        case=case,
        kind=kind,
        layout=f"{name_of(filled[0])}, {sizes_of(filled[0])}",
        filled=filled[1].step,
        same=same,
        other=f"{name_of(best[0])}, {sizes_of(best[0])}",
        unfilled=best[1],
    )


def table_of(found: Sequence[Gain]) -> Table:
    """One row for each."""
    columns = ("model", "A100s", "each", "filled", "best unfilled", "filled ms", "same unfilled ms", "unfilled ms")
    made = table("What filling alone gives", (*columns, "x same", "x best"), num_left=1)
    for index in (3, 4):
        made.columns[index].justify = "left"
    for one in found:
        steps = (f"{1e3 * step:.1f}" for step in (one.filled, one.same, one.unfilled))
        place = (one.case.model, str(one.case.devices), str(one.case.per_device))
        made.add_row(*place, one.layout, one.other, *steps, f"{one.over_same:.3f}", f"{one.over_best:.3f}")
    return made


def draw(found: Sequence[Gain], path: Path) -> None:
    """Bars of the gain over the best unfilled layout, and marks of that over the same one."""
    figure = new_figure(9, 3.4)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    cases = list(dict.fromkeys(one.case for one in found))
    for place, (kind, color) in enumerate(zip(KINDS, ("tab:cyan", "tab:blue"), strict=True)):
        mine = [one for one in found if one.kind == kind]
        places = [cases.index(one.case) + 0.4 * (place - 0.5) for one in mine]
        axes.bar(
            places, [one.over_best - 1 for one in mine], 0.36, bottom=1, color=color, label=f"{kind}, each at its best"
        )
        axes.plot(places, [one.over_same for one in mine], "k_", markersize=10, label=None if place else "same layout")
    names = [f"{case.model.partition(',')[0].partition(' v')[0]}\n{case.devices} x {case.per_device}" for case in cases]
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("Speed over the same kind of layout with all encoders first, simulated", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)

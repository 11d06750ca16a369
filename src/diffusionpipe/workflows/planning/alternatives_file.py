"""The alternatives of a search beside its plan file: plan.json has plan.alternatives.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir.alternatives import Alternative, Alternatives, HeldItem, mark_of
from diffusionpipe.ir.files import ALTERNATIVES, read_file, schedule_to_text, write_file
from diffusionpipe.planner.search.naming import name_of_plan, sizes_of_plan

if TYPE_CHECKING:
    from diffusionpipe.ir import Plan
    from diffusionpipe.planner.choosing.explain import Comparison
    from diffusionpipe.planner.choosing.rows import Row


def alternatives_file(plan_file: Path) -> Path:
    """The path of the file beside a plan file that holds the other layouts of its search."""
    return plan_file.with_suffix(".alternatives.json")


def alternatives_of(comparison: Comparison, plan: Plan) -> Alternatives:
    """The layouts that a search compared, with its verdict and remarks, for the plan that was chosen."""
    tried = comparison.tried
    return Alternatives(
        plan=mark_of(plan, schedule_to_text(plan.train)),
        verdict=comparison.verdict,
        remarks=tuple(remark.text for remark in comparison.remarks),
        layouts=tuple(_layouts(comparison)),
        estimated=tried.estimated if tried else 0,
        simulated=tried.simulated if tried else 0,
    )


def alternatives_of_rows(plan: Plan, why: str, rows: Iterable[Row]) -> Alternatives:
    """The layouts that the library compared, the plan's own among them, with the verdict and remarks.

    `why`: lines of text, the verdict first.
    """
    chosen = name_of_plan(plan), sizes_of_plan(plan)
    layouts = tuple(
        _layout(row, "simulated" if row.use else "estimated", is_chosen=(row.name, row.sizes) == chosen) for row in rows
    )
    mark, (verdict, *remarks) = mark_of(plan, schedule_to_text(plan.train)), why.splitlines() or [""]
    return Alternatives(plan=mark, verdict=verdict, remarks=tuple(remarks), layouts=layouts)


def _layouts(comparison: Comparison) -> Iterator[Alternative]:
    chosen = comparison.winner.name, comparison.winner.sizes
    groups = (("simulated", comparison.simulated), ("estimated", comparison.estimated), ("other", comparison.others))
    for found, rows in groups:
        for row in rows:
            yield _layout(row, found, is_chosen=found == "simulated" and (row.name, row.sizes) == chosen)


def _layout(row: Row, found: str, *, is_chosen: bool) -> Alternative:
    items = row.use.items() if is_chosen and row.use is not None else {}
    return Alternative(
        name=row.name,
        sizes=row.sizes,
        step=row.step,
        samples_per_second=row.samples_per_second,
        bubble=row.bubble,
        memory=round(row.memory),
        overflow=round(row.overflow),
        found=found,
        is_chosen=is_chosen,
        items=tuple(HeldItem(kind, round(held)) for kind, held in items.items() if held),
    )


def write_alternatives(comparison: Comparison, plan: Plan, plan_file: Path) -> None:
    """Write the layouts of a comparison into the file beside the plan file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file(alternatives_of(comparison, plan), alternatives_file(plan_file), ALTERNATIVES)


def read_alternatives(plan_file: Path, plan: Plan) -> Alternatives | str:
    """The layouts in the file beside a plan file; or, as text, the reason why there are none for this plan."""
    path = alternatives_file(plan_file)
    if not path.exists():
        return (
            f"there is no {path.name}: the plan was not searched for, or it was made by a version that did not keep "
            "the other layouts"
        )
    try:
        found = read_file(path, ALTERNATIVES)
    except FileFormatError as error:
        return str(error).splitlines()[0].replace(str(path), path.name)
    if found.plan != mark_of(plan, schedule_to_text(plan.train)):
        return f"{path.name} belongs to another plan"
    return found

"""Plans and runs in notebooks: the page of `diffusionpipe report` in a frame of its own, and tables.

A frame holds its whole page as text, in a sandbox without an origin: it asks for nothing, and no style and no script of
one cell reaches another. A table is a plain one in the style of the notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from diffusionpipe.ir import Plan
from diffusionpipe.ir import Timeline as Spans
from diffusionpipe.viz import MILLISECONDS
from diffusionpipe.workflows.planning.times import PlanTimes
from diffusionpipe.workflows.report.figures import Json, absent
from diffusionpipe.workflows.report.metrics import Metrics
from diffusionpipe.workflows.report.page import page_of_plan, page_of_run
from diffusionpipe.workflows.report.plan import PlanPage

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.rows import Row

HEIGHT = 640
"""The height of a frame, in pixels; its page scrolls."""


class TextTable(str):
    """A table as a text; a notebook shows it as an HTML table."""

    cells: tuple[tuple[str, ...], ...]
    """The cells, row by row; the first row has the names of the columns."""

    def _repr_html_(self) -> str:
        head, *rows = self.cells
        lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        names = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def table(text: str, cells: Sequence[Sequence[str]]) -> TextTable:
    """A table that prints as `text`; a notebook shows `cells`, rows of which the first has the columns' names."""
    made = TextTable(text)
    made.cells = tuple(tuple(row) for row in cells)
    return made


def frame(page: str, name: str) -> str:
    """The HTML of a frame that shows a page in a notebook's cell. `page`: its HTML. `name`: the frame's title."""
    return (
        f'<iframe sandbox="allow-scripts" title="{escape(name, quote=True)}" width="100%" height="{HEIGHT}" '
        f'style="border:0" srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def shown_plan(plan: Plan, predicted: Spans, rows: Sequence[Row], why: str) -> str:
    """The HTML that shows a plan, its predicted timeline and the other layouts in a notebook's cell.

    `rows`: the compared layouts. `why`: the reason for the plan.
    """
    from diffusionpipe.workflows.planning.alternatives_file import alternatives_of_rows
    from diffusionpipe.workflows.report.plan import layouts_of

    layouts = layouts_of(alternatives_of_rows(plan, why, rows), "this plan")
    measured = "a plan has not run yet; the page of a run has its measured step"
    return frame(page_of_plan(_page(plan, predicted, measured, layouts), "plan"), "plan")


def shown_run(plan: Plan, measured: Spans | str, metrics: Metrics) -> str:
    """The HTML that shows a run's loss and time of each step, and its last measured step, in a notebook's cell.

    `measured`: the timeline of that step, or a text that says why there is none.
    """
    predicted = "a run does not keep the prediction; the plan has it"
    layouts = absent("a run does not keep the layouts beside its own; the plan has them")
    return frame(page_of_run(_page(plan, predicted, measured, layouts), metrics, "run"), "run")


def _page(plan: Plan, predicted: Spans | str, measured: Spans | str, layouts: Json) -> PlanPage:
    times = (
        predicted
        if isinstance(predicted, str)
        else PlanTimes(source="this plan, in memory", timeline=predicted, axis=MILLISECONDS)
    )
    return PlanPage(
        plan=plan, file="this plan", predicted=times, source="this plan", actual=measured, alternatives=layouts
    )

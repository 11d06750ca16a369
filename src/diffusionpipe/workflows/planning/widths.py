"""The widths in which frozen weights may be stored, each planned: which fit, how fast, in how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffusionpipe.costs.forms import Form
from diffusionpipe.planner.choosing.advice import nearest_layout, recomputed
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.choosing.recomputation import best_way

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.advice import Nearest
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.workflows.planning.question import PlanQuestion
    from diffusionpipe.workflows.planning.stated_model import StatedModel

WIDTHS: tuple[Form | None, ...] = (None, Form.INT8, Form.NF4)
"""The widths that are tried, widest first; None: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWidth:
    """One width of stored frozen weights, and the best plan with it, or the layout that lacks least."""

    name: str
    asked: PlanQuestion
    """The question to the planner with this width."""
    choice: Choice | None
    """None where nothing fits."""
    nearest: Nearest | None
    """The layout that lacks least, where nothing fits."""


def tried_widths(model: StatedModel, ask: Callable[[StatedModel], PlanQuestion]) -> Iterator[PlannedWidth]:
    """Yield each width of frozen weights with its best plan, as soon as it is found.

    `ask` makes the question for a model.
    """
    for form in WIDTHS:
        asked = ask(replace(model, form=form, has_narrow_store=True))
        choice = best_way(asked.setting, fill=asked.fill, may_recompute=asked.may_recompute)
        nearest = None
        if choice is None:
            least = recomputed(asked.setting) if asked.may_recompute else None
            nearest = nearest_layout(least or asked.setting)
        yield PlannedWidth(name=form or "bfloat16", asked=asked, choice=choice, nearest=nearest)


def fastest_of(widths: Sequence[PlannedWidth]) -> PlannedWidth:
    """The width to recommend, out of widths in order from wide to narrow; the last one if none fits.

    A narrower width has larger errors. So it replaces the one taken before only if its step is faster by more than a
    near-tie, or if none fitted before.
    """
    found: PlannedWidth | None = None
    for width in widths:
        step = width.choice.step if width.choice else float("inf")
        best = found.choice.step if found is not None and found.choice else float("inf")
        if step < best / (1 + NEAR_TIE):
            found = width
    return found or widths[-1]

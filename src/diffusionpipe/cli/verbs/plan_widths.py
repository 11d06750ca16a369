"""`diffusionpipe plan --frozen-dtype auto`: a line for each width of frozen weights, then the plan of the fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from diffusionpipe.workflows.planning.question import PlanQuestion
    from diffusionpipe.workflows.planning.stated_model import StatedModel
    from diffusionpipe.workflows.planning.widths import PlannedWidth


def asked_by_width(model: StatedModel, ask: Callable[[StatedModel], PlanQuestion]) -> PlanQuestion:
    """The question with the width of frozen weights that is fastest among those that fit; prints a line for each.

    `ask` makes the question for a model with one width.
    """
    from diffusionpipe.workflows.planning.widths import fastest_of, tried_widths

    widths = []
    for width in tried_widths(model, ask):
        typer.echo(line_of(width))
        widths.append(width)
    return fastest_of(widths).asked


def line_of(width: PlannedWidth) -> str:
    """The line of one width of frozen weights: the step, the memory of the fullest device, and the layout.

    If no layout fits, it gives the memory that is missing, or says that no layout can divide the batch.
    """
    from diffusionpipe.planner.choosing.rows import GIB

    begin = f"frozen weights in {width.name}:"
    if width.choice is not None:
        row, batch = width.choice.row, width.choice.setting.workload.batch
        return (
            f"{begin} {width.choice.step * 1e3:.1f} ms for a batch of {batch}, fullest device {row.memory / GIB:.1f} "
            f"GiB: {width.choice.sizes}"
        )
    if width.nearest is None:
        return f"{begin} no layout can divide the batch"
    return f"{begin} lacks {width.nearest.proposal.overflow / GIB:.1f} GiB: {width.nearest.layout}"

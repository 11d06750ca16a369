"""`diffusionpipe plan --models`: which shipped models fit a cluster, a row for each as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from diffusionpipe.cli.verbs.terminal import TERMINAL

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster
    from diffusionpipe.workflows.planning.model_table import ModelAnswer

WIDTH = 80


def print_models(text: str, cluster: Cluster, batches: Sequence[int], *, uses_cache: bool) -> None:
    """Prints a table of the shipped models that `text` names: whether each fits the cluster, its rate and memory.

    Raises:
        ConfigError: a model is not shipped, several batches are named, or the cluster's devices are not known.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.planning.model_table import answers, models_named

    if len(batches) > 1:
        raise ConfigError("--batch: --models takes one batch; give one, or leave it out")
    names = models_named(text)
    batch = batches[0] if batches else None
    room = max(map(len, names))
    typer.echo(f"{'model':{room}}  trained   batch  samples/s  peak GiB  layout, or what is missing")
    for answer in answers(names, cluster, batch=batch, tell=TERMINAL, uses_cache=uses_cache):
        typer.echo(row_of(answer, room))


def row_of(answer: ModelAnswer, room: int) -> str:
    """The row of one model in the table, at most `WIDTH` columns; names of models take `room` columns."""
    from diffusionpipe.cli.text.plan_screen import cut, layout_of
    from diffusionpipe.planner.choosing.rows import GIB

    begin = f"{answer.model:{room}}  {answer.trained:8}"
    tried, nearest = answer.tried, answer.nearest
    if tried is not None and tried.choice is not None:
        row = tried.choice.row
        begin += f"  {tried.batch:5}  {tried.rate:9.3g}  {row.memory / GIB:8.1f}  "
        return begin + cut(layout_of(tried.choice, is_short=True), WIDTH - len(begin))
    if nearest is None:
        return f"{begin}  no layout can divide the batch"
    text = f"lacks {nearest.proposal.overflow / GIB:.1f} GiB: {nearest.layout}"
    return f"{begin}  {cut(text, WIDTH - len(begin) - 2)}"

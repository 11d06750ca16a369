"""`diffusionpipe plan --quality RUN`: batches and layouts by the time to one loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diffusionpipe.workflows.planning.run_quality import check_same_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffusionpipe.planner.choosing.quality import ReachedLoss, StagesWay
    from diffusionpipe.workflows.planning.question import PlanQuestion


def print_quality(run: Path, reached: ReachedLoss, asked: PlanQuestion, batches: Sequence[int]) -> None:
    """Print a table of batches and layouts with their times to the loss of the run in the folder `run`.

    `reached`: the batch, steps and noise scale with which the run reached it.

    Raises:
        ConfigError: the run trained another model, or nothing fits.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choosing.quality import batches_for, ways

    check_same_model(run, asked)
    setting = asked.setting
    tried = batches or batches_for(reached, setting.cluster.num_ranks)
    found = list(ways(setting, tried, reached, fill=asked.fill, may_recompute=asked.may_recompute))
    if not found:
        raise ConfigError("--quality: nothing fits at these batches; plan without --quality, which says what would")
    for line in quality_lines(found, reached):
        typer.echo(line)


def quality_lines(found: Sequence[StagesWay], reached: ReachedLoss) -> Iterator[str]:
    """The lines of the screen: the run, a row for each batch and layout, and from which batch on pipelines win."""
    from diffusionpipe.cli.text.text_table import text_table

    yield (
        f"noise scale {reached.scale:.3g} samples; the run's loss took {reached.steps:,} steps with a batch of "
        f"{reached.batch}"
    )
    yield ""
    best = min(found, key=lambda way: way.seconds)
    rows = [("", "batch", "copies x stages", "samples a second", "steps", "hours to the loss", "times as long")]
    for way in found:
        copies = way.choice.setting.cluster.num_ranks // way.stages
        figures = (
            f"{way.rate:.3g}",
            f"{way.steps:,.0f}",
            f"{way.seconds / 3600:.3g}",
            f"{way.seconds / best.seconds:.2f}",
        )
        rows.append((">" if way is best else "", str(way.batch), f"{copies} x {way.stages}", *figures))
    yield from text_table(rows, 80)
    yield ""
    yield from _switches(found, reached)
    yield "A larger batch has more samples a second, but the same loss takes more samples:"
    yield "samples in proportion to 1 + batch / noise scale, steps to 1 + noise scale / batch."
    yield f"Pipelines run 1f1b here; plan --batch {best.batch} compares all schedules."


def _switches(found: Sequence[StagesWay], reached: ReachedLoss) -> Iterator[str]:
    """A line for each number of stages: from which batch on pipelines of copies beat more copies."""
    from diffusionpipe.planner.choosing.quality import switch_in

    rates: dict[int, dict[int, float]] = {}
    for way in found:
        rates.setdefault(way.stages, {})[way.batch] = way.rate
    for stages, own in sorted(rates.items()):
        # Both sides have the same number of samples on each copy.
        known = [batch for batch in own if batch * stages in rates.get(1, {})]
        if stages == 1 or not known:
            continue
        switch = switch_in(own, rates[1], stages, reached.scale)
        beats = "at no batch here" if switch is None else f"from a batch of {switch} on"
        yield f"{stages} stages beat {stages} times as many copies with {stages} times the batch {beats}."

"""The pictures of a run's measured timeline: timeline.png, with the prediction above it, and trace.json."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.ir import Mesh, Plan, Timeline
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.viz.gantt import Panel


def draw_timeline(recipe: "Recipe") -> None:
    """Draw the timeline.json of a finished run, with its prediction, into timeline.png and trace.json beside it."""
    from diffusionpipe.ir.files import read_plan, read_timeline
    from diffusionpipe.ir.own_schedules import in_one_table
    from diffusionpipe.viz.copies import shown_copies
    from diffusionpipe.viz.gantt import gantt, panel_of
    from diffusionpipe.viz.perfetto import perfetto

    folder = recipe.run.folder
    timeline, plan = read_timeline(folder / "timeline.json"), read_plan(folder / "plan.json")
    predicted = predicted_step(recipe, plan)
    panels = [predicted_panel(predicted, plan.mesh)] if predicted is not None else []
    names = [Path(recipe.alone(name).model.path).name for name in recipe.backbones]
    title = f"{' and '.join(names)}, {timeline_title(plan, timeline)}"
    if "" not in shown_copies(timeline):
        title += " (fastest, median and slowest copy)"
    timeline, schedule = in_one_table(timeline, plan.train)
    gantt([*panels, panel_of("measured", timeline)], folder / "timeline.png", title=title, schedule=schedule)
    perfetto(timeline, folder / "trace.json", schedule=schedule)


def predicted_step(recipe: "Recipe", plan: "Plan") -> "Timeline | None":
    """The predicted timeline of a run's step, with the update if it is known; None if no times are known.

    A run that measured has its profile and its cluster; a plan file its prediction beside it.
    """
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.ir import Phase
    from diffusionpipe.planner import predicted_timeline
    from diffusionpipe.planner.pricing.stage_costs import update_time
    from diffusionpipe.workflows.planning.prediction_file import read_prediction
    from diffusionpipe.workflows.training.run_facts import cluster_of_run

    if recipe.pipeline.plan_file is not None:
        return read_prediction(recipe.pipeline.plan_file, plan)
    if not recipe.pipeline.is_profiled:
        return None
    folder = recipe.run.folder
    profile = read_profile(folder / "profile.json")
    timeline = predicted_timeline(profile, plan, cluster_of_run(folder))
    seconds, start = update_time(plan.train, plan.blocks, profile, plan.mesh), timeline.makespan
    if not seconds:
        return timeline
    workers = range(timeline.num_workers)
    # All workers update at once when the slowest has ended its iteration.
    return replace(
        timeline,
        update=tuple(Phase(worker=worker, name="update", start=start, end=start + seconds) for worker in workers),
    )


def predicted_panel(timeline: "Timeline", mesh: "Mesh") -> "Panel":
    """A panel of the predicted timeline of one pipeline, whose rows have the names of the ranks in all copies."""
    from diffusionpipe.viz.gantt import Panel
    from diffusionpipe.workflows.training.run_facts import ranks_text

    def name_of(worker: int) -> str:
        if mesh.pipeline == 1 < mesh.data_parallel:
            return "each rank"
        return ranks_text([mesh.rank(group, worker) for group in range(mesh.data_parallel)])

    rows = tuple((worker, name_of(worker)) for worker in range(timeline.num_workers))
    return Panel(name="predicted", timeline=timeline, rows=rows)


def timeline_title(plan: "Plan", timeline: "Timeline | None" = None) -> str:
    """A title for the picture of an iteration: the layout and its sizes.

    `timeline`: the measured step, whose copies may have cut their samples by tokens, each into micro-batches of its
    own; else the numbers are the plan's.
    """
    from diffusionpipe.workflows.training.run_facts import microbatches_of, named_microbatches

    mesh, own = plan.mesh, timeline.schedules if timeline is not None else ()
    counts = sorted({microbatches_of(schedule) for schedule in own or (plan.train,)})
    counted = named_microbatches(counts[-1]) + (" by tokens" if own else "")
    # Only steps by tokens have several numbers, and they have one model.
    counted = counted if len(counts) == 1 else f"{counts[0][0]} to {counted}"
    sizes = f"{counted}{' each' if mesh.data_parallel > 1 else ''}, batch {plan.batch}"
    ranks = _count(mesh.num_ranks, "rank")
    sharded = "sharded " if mesh.shard > 1 else ""
    sizes += ", optimizer states in parts" if mesh.owners > 1 else ""
    if mesh.num_ranks == 1:
        return f"one rank: {sizes}"
    if mesh.pipeline == 1:
        return f"{sharded}data parallelism: {ranks}, {sizes}"
    if mesh.data_parallel > 1:
        return f"{plan.train.name}: {ranks} in {mesh.data_parallel} {sharded}copies of the pipeline, {sizes}"
    return f"{plan.train.name}: {ranks}, {sizes}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number != 1 else ''}"

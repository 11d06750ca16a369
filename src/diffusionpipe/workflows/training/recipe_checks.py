"""The faults of a recipe on these ranks and in this folder, beside its keys' own: found before ranks start.

Each check takes sections of the recipe by name and yields "section.key: problem", as the checks of `trainer.recipe` do.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe import (
        Check,
        DataSection,
        LearningRateSection,
        MemberSection,
        OptimizerSection,
        PipelineSection,
        RunSection,
        TrainingSection,
    )

_FILES = (
    "recipe.toml",
    "plan.json",
    "metrics.jsonl",
    "expected_step.json",
    "timeline.json",
    "timeline.png",
    "trace.json",
    "loss.png",
    "samples.png",
)
_FOLDERS = ("checkpoints", "samples", "tensorboard", "export")
"""The folders that a run writes into its folder."""


def has_known_schedule(*, pipeline: "PipelineSection", models: "Mapping[str, MemberSection]") -> Iterator[str]:
    """Yield a problem if `pipeline.schedule` is unknown, or is for several models and there is one."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.schedules import generator_of
    from diffusionpipe.schedules.several.opposed import JOINT

    if pipeline.schedule in JOINT:
        if not models:
            yield f"pipeline.schedule: {pipeline.schedule} is for several models, [models.NAME]; choose another"
    elif pipeline.schedule is not None:
        try:
            generator_of(pipeline.schedule)
        except ConfigError as error:
            yield f"pipeline.schedule: {error}"


def has_data(*, data: "DataSection") -> Iterator[str]:
    """Yield a problem for each folder of pictures that is not there."""
    from diffusionpipe.trainer.data.places import problem_of_place

    for key, path in _folders(data):
        if problem := problem_of_place(path):
            yield f"data.{key}: {problem}"


def _folders(data: "DataSection") -> Iterator[tuple[str, Path]]:
    """Yield (key in [data], path) for each folder of training pictures and for the validation data."""
    yield from ((f"sources.{name}.path" if name else "train", path) for name, path in data.folders.items())
    if data.validation is not None:
        yield "validation", data.validation


def has_apart_folders(*, run: "RunSection", data: "DataSection") -> Iterator[str]:
    """Yield a problem if the run's outputs would lie in a folder of pictures: its samples would become data."""
    # Links resolved: the run may be reached by another path.
    own = Path(os.path.realpath(run.folder))
    for key, path in _folders(data):
        pictures = Path(os.path.realpath(path))
        if own.is_relative_to(pictures):
            where = "is" if own == pictures else "lies in"
            yield (
                f"run.folder: {run.folder} {where} the folder of pictures of data.{key}, which would then read the "
                "run's own pictures; choose another folder"
            )


def has_trackers(*, run: "RunSection") -> Iterator[str]:
    """Yield a problem for each named tracker that is not installed."""
    from diffusionpipe.trainer.reporting.trackers import problems_of_trackers

    yield from problems_of_trackers(run)


def _problems_of_orders(pipeline: "PipelineSection", num_ranks: int) -> Iterator[str]:
    from diffusionpipe.errors import ConfigError, ScheduleError
    from diffusionpipe.workflows.training.recipe_orders import orders_of

    try:
        orders_of(pipeline, num_ranks)
    except (ConfigError, ScheduleError) as error:
        yield "pipeline.orders: " + str(error).replace("\n", "\n  ")


def _problems_of_versions(
    pipeline: "PipelineSection", learning_rate: "LearningRateSection", num_stages: int
) -> Iterator[str]:
    """Yield problems of training without a flush: no window, too short a delay, rates by staleness without effect."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.passes import with_versions
    from diffusionpipe.planner.assembly.windows import overlap
    from diffusionpipe.trainer.optim.staleness_rates import fading_staleness

    if pipeline.versions is Versions.FLUSHED:
        return
    sizes = pipeline.sizes
    try:
        window = overlap(num_stages, sizes.microbatches, sizes.schedule)
        window = with_versions(window, pipeline.versions, pipeline.delay or 1)
    except ConfigError as error:
        yield f"pipeline.versions: {error}"
        return
    try:
        fading_staleness(learning_rate.by_staleness, window)
    except ConfigError as error:
        yield str(error)


def _problems_of_parts(pipeline: "PipelineSection", num_models: int) -> Iterator[str]:
    """Yield a problem if blocks are sharded and the schedule has a block several times in one copy of the pipeline."""
    from diffusionpipe.combinations.features import Feature
    from diffusionpipe.combinations.refused import refusal
    from diffusionpipe.schedules.traits import holds_blocks_once

    schedule = pipeline.sizes.schedule
    if pipeline.sharded and pipeline.orders is None and num_models == 1 and not holds_blocks_once(schedule):
        yield f"pipeline.schedule: {refusal(Feature.SHARDED, Feature.TWO_DIRECTIONS, schedule=schedule)}"


def _problems_of_plan(path: Path, batch: int, num_ranks: int) -> Iterator[str]:
    """Yield the problem of a plan file, if it has one: it cannot be read, or is for another batch or number of ranks.

    Rank 0 compares the plan with the model later.
    """
    from diffusionpipe.errors import ConfigError, FileFormatError
    from diffusionpipe.trainer.setup.plan_file import check_plan_file

    try:
        check_plan_file(path, batch=batch, num_ranks=num_ranks)
    except (ConfigError, FileFormatError) as error:
        yield "pipeline.plan: " + str(error).removeprefix("pipeline.plan: ").replace("\n", "\n  ")


def _problems_of_sizes(
    training: "TrainingSection",
    learning_rate: "LearningRateSection",
    pipeline: "PipelineSection",
    *,
    num_ranks: int,
    num_models: int,
) -> Iterator[str]:
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.pricing.given import check_given
    from diffusionpipe.trainer.recipe import replicas_of_stages
    from diffusionpipe.workflows.planning.recipe_setting import given_sizes

    try:
        if pipeline.is_searched:
            check_given(given_sizes(pipeline), batch=training.batch, num_ranks=num_ranks, num_backbones=num_models)
        elif pipeline.plan_file is None:
            num_stages = len(replicas_of_stages(pipeline, num_ranks))
            yield from _problems_of_versions(pipeline, learning_rate, num_stages)
            yield from _problems_of_orders(pipeline, num_ranks)
            yield from _problems_of_parts(pipeline, num_models)
        else:
            yield from _problems_of_plan(pipeline.plan_file, training.batch, num_ranks)
    except ConfigError as error:
        yield from (line if line.startswith("pipeline.") else f"pipeline: {line}" for line in str(error).split("\n"))


def _places_that_are_taken(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, reason) for each path in the run folder that a run cannot write because something else has its name.

    A FIFO would stop it for ever.
    """
    from diffusionpipe.files.input_file import problem_of_file
    from diffusionpipe.trainer.launching.launch import LOGS

    for path in (*(folder / name for name in _FILES), *sorted((folder / LOGS).glob("*rank_*"))):
        if problem := problem_of_file(path):
            yield path, problem
    for path in (folder / name for name in _FOLDERS):
        # A broken link counts: a folder cannot be made in its place.
        if os.path.lexists(path) and not path.is_dir():
            yield path, "it is not a folder"


def checks_of_run(num_ranks: int, resume: str | None, *, all_train: bool = False) -> "Sequence[Check]":
    """All checks of a recipe for a run with `num_ranks` ranks; each yields problems, as the module says.

    `resume`: the value of --resume; None for none. `all_train`: whether the ranks are only those that `pipeline.use`
    leaves.
    """

    def has_sizes_for_the_ranks(
        *,
        training: "TrainingSection",
        learning_rate: "LearningRateSection",
        pipeline: "PipelineSection",
        models: "Mapping[str, MemberSection]",
    ) -> Iterator[str]:
        from diffusionpipe.errors import RecipeError
        from diffusionpipe.trainer.recipe import ranks_that_train

        # Its own check reports it; sizes cannot be judged without a schedule.
        if any(has_known_schedule(pipeline=pipeline, models=models)):
            return
        try:
            count = num_ranks if all_train else len(ranks_that_train(pipeline, num_ranks))
        except RecipeError as error:
            yield str(error)
            return
        yield from _problems_of_sizes(
            training, learning_rate, pipeline, num_ranks=count, num_models=max(1, len(models))
        )

    def has_a_usable_folder(*, run: "RunSection") -> Iterator[str]:
        from diffusionpipe.files.output_file import check_folder, reason_of
        from diffusionpipe.trainer.launching.launch import LOGS

        try:
            check_folder(run.folder / LOGS)
        except OSError as error:
            yield (
                f"run.folder: nothing can be written to {run.folder}: {reason_of(error)}; choose another folder, or "
                "mend this one"
            )
        for path, problem in _places_that_are_taken(run.folder):
            yield f"run.folder: {path}: {problem}; move it away, or choose another folder"

    def has_a_free_folder(*, run: "RunSection") -> Iterator[str]:
        from diffusionpipe.trainer.checkpoints.checkpoint import is_interrupted, problem_of_folder
        from diffusionpipe.trainer.launching.run_lock import is_held

        if is_held(run.folder) or is_interrupted(run.folder):
            return  # the lock names the job that uses it; rank 0 cleans it and looks again
        problem = problem_of_folder(run.folder, resume)
        if problem is not None:
            yield f"{'run.folder' if resume is None else '--resume'}: {problem}"

    def has_an_optimizer_for_the_ranks(*, optimizer: "OptimizerSection", pipeline: "PipelineSection") -> Iterator[str]:
        from diffusionpipe.errors import RecipeError
        from diffusionpipe.trainer.optim.prodigy import PATHS
        from diffusionpipe.trainer.optim.trial import sums_over_all

        # Copies hold whole parameters, so sums over all are complete on each.
        is_whole = num_ranks == 1 or (pipeline.stages == 1 and not pipeline.sharded)
        if is_whole or "." not in optimizer.name or optimizer.name in PATHS:
            return
        try:
            if sums_over_all(optimizer.name, optimizer.arguments):
                yield (
                    f"optimizer.name: {optimizer.name} changes a parameter by sums over all others, and each rank has "
                    "only its own; choose another one (prodigyopt.Prodigy sums over ranks), or set pipeline.stages = 1"
                )
        except RecipeError as error:
            yield f"optimizer.name: {error}"

    return (
        has_known_schedule,
        has_an_optimizer_for_the_ranks,
        has_data,
        has_apart_folders,
        has_trackers,
        has_sizes_for_the_ranks,
        has_a_usable_folder,
        has_a_free_folder,
    )

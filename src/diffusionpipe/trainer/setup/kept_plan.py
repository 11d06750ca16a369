"""The plan in a run's folder, by which the run continues when it is resumed.

Planning again could give another plan: a newer version counts or searches differently. So the run keeps its plan while
what the plan was made for stays the same.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import read_plan
from diffusionpipe.ir.versions import Versions
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.model.workload import samples_drawn_together, workload_of
from diffusionpipe.trainer.recipe import PLAN, PipelineSection, Recipe, recorded_recipe
from diffusionpipe.trainer.setup.job_profile import has_other_profile
from diffusionpipe.trainer.setup.plan_file import read_plan_file

logger = logging.getLogger(__name__)

_CHANGES_NO_PLAN = {"replan"}
"""The keys of [pipeline] that do not change a plan."""


def kept_plan(model: ModelGraph, recipe: Recipe, job: Job) -> Plan | None:
    """The plan in the folder of a run that is resumed; None if the run must be planned again.

    The plan is kept if model, number of ranks and stated sizes are the same; if not, the reason is logged. None without
    a log line if there is no plan, if the recipe names a plan file or a file of orders, which is read again, and for
    training without a flush, whose window follows from the recipe alone.
    """
    path, pipeline = recipe.run.folder / PLAN, recipe.pipeline
    if pipeline.plan_file is not None or pipeline.orders is not None or pipeline.versions is not Versions.FLUSHED:
        return None
    if not path.exists():
        return None
    try:
        changes = list(_changes(path, model, recipe, job))
        plan = None if changes else read_plan_file(path, model, recipe, job.membership.world_size)
    except ConfigError as error:  # a plan that cannot be read is made again
        changes, plan = [" ".join(str(error).split())], None
    if plan is None:
        logger.info('planned_again=True reason="%s"', "; ".join(changes))
    else:
        logger.info("plan=%s kept=True", path)
    return plan


def _changes(path: Path, model: ModelGraph, recipe: Recipe, job: Job) -> Iterator[str]:
    """A sentence for each fact on which the plan in the file at `path` depends and that has changed since."""
    before, num_ranks = read_plan(path).mesh.num_ranks, job.membership.world_size
    if before != num_ranks:
        yield f"the run had {before} ranks, and has {num_ranks}"
    stated = recorded_recipe(path.with_name("recipe.toml"))
    old, new = _sizes(stated), _sizes(recipe)
    yield from (f"{key} was {old[key]}, and is {new[key]}" for key in new if old[key] != new[key])
    if recipe.pipeline.is_profiled and has_other_profile(model, recipe, job):
        yield "the profile was measured for a different model or on a different device"


def _sizes(recipe: Recipe) -> dict[str, object]:
    """The values of a recipe on which a plan depends besides model, ranks and measurements, by name."""
    keys = PipelineSection.model_fields.keys() - _CHANGES_NO_PLAN
    pipeline = {f"pipeline.{key}": getattr(recipe.pipeline, key) for key in sorted(keys)}
    micro = {f"models.{name}.microbatches": own.microbatches for name, own in recipe.models.items()}
    workload = {f"workload.{key}": value for key, value in asdict(workload_of(recipe)).items()}
    return {**pipeline, **micro, **workload, "samples drawn together": samples_drawn_together(recipe)}

"""The plan of a job: rank 0 makes it or reads it from a file, and every rank gets the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diffusionpipe.costs import Cluster, Device, ModelGraph, Profile
from diffusionpipe.ir import Plan
from diffusionpipe.ir.cells import Cutting
from diffusionpipe.ir.files import plan_from_text, plan_to_text
from diffusionpipe.profiler.links import usable_memory
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.agreement import from_first
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.model.members import RecipeModels
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.screen import NoScreen, Screen
from diffusionpipe.trainer.setup.job_cluster import agree_on_cluster
from diffusionpipe.trainer.setup.job_profile import ProfileCache, agree_on_profile
from diffusionpipe.trainer.setup.kept_plan import kept_plan
from diffusionpipe.trainer.setup.plan_file import read_plan_file

MakePlan = Callable[[ModelGraph, Recipe, int, Profile | None, Cluster | None], Plan]
"""A function that makes a plan: (model, recipe, number of ranks, profile, cluster) -> plan.

The caller of a run hands it in. The profile and the cluster are None unless the recipe fills bubbles or searches.
"""

MakeCutting = Callable[[Sequence[ModelGraph], Plan], Cutting]
"""A function (model for each size of samples, plan) -> a function that cuts a step into micro-batches of unequal sizes.

It is called on every rank.
"""

CheckPlan = Callable[[Plan, RecipeModels, Sequence[Device]], None]
"""A function (plan, models, device of each rank) that refuses a plan that does not fit in the devices' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """The functions and facts for planning that the caller of a run hands in."""

    make_plan: MakePlan
    """Makes a plan, on rank 0."""
    make_cutting: MakeCutting
    """Makes the function that cuts steps into micro-batches of unequal sizes, on every rank."""
    shelf: ProfileCache | None = None
    """The store of profiles of all runs, which also keeps this run's; None to measure always."""
    check_plan: CheckPlan | None = None
    """Checks that a plan file fits in memory, before the weights are loaded; None: no check. The same on all ranks."""
    screen: Screen = field(default_factory=NoScreen)
    """The screen on which rank 0 shows the progress of measurements."""
    shares: tuple[float, ...] = ()
    """The fraction of the training samples that has each of the model's sizes; () if all have one size."""
    is_resumed: bool = False
    """Whether the run continues from a checkpoint, and so by the plan in its folder (see `kept_plan`)."""


def agree_on_plan(opened: RecipeModels, recipe: Recipe, job: Job, planning: Planning) -> Plan:
    """The plan for all ranks: from the recipe's plan file, from the folder of a resumed run, or made on rank 0.

    Every rank calls it. If the recipe fills bubbles or searches sizes, links and layers are measured first.

    Raises:
        ConfigError: on every rank, if the sizes or the plan file do not fit, or nothing fits in memory.
    """
    pipeline, num_ranks, model = recipe.pipeline, job.membership.world_size, opened.model
    screen = planning.screen
    cluster = profile = kept = None
    if planning.is_resumed and job.membership.rank == 0:  # before another profile is measured
        kept = kept_plan(model, recipe, job)
    if pipeline.is_profiled:
        cluster = agree_on_cluster(recipe, job, screen)
        links = cluster if pipeline.cluster is None else None  # one that the recipe names has not been measured here
        profile = agree_on_profile(opened, job, planning.shares, shelf=planning.shelf, screen=screen, links=links)

    def make() -> str:
        if pipeline.plan_file is not None:
            return plan_to_text(read_plan_file(pipeline.plan_file, model, recipe, num_ranks))
        if kept is not None:
            return plan_to_text(kept)
        with screen.work("planning"):
            return plan_to_text(planning.make_plan(model, recipe, num_ranks, profile, cluster))

    return plan_from_text(from_first(make))


def check_plan_fits(plan: Plan, opened: RecipeModels, job: Job, planning: Planning) -> None:
    """Refuses the plan of a plan file that does not fit in the devices' memory. Every rank calls it.

    Without a plan file, or without a check in `planning`, it does nothing.

    Raises:
        ConfigError: on every rank, the error of the check in `planning`.
    """
    check = planning.check_plan
    if check is None or opened.recipe.pipeline.plan_file is None:
        return
    memories, name = gather(usable_memory(job), form_of(int)), device_name(job.device)
    devices = [Device(name=name, memory=memory) for memory in memories]
    from_first(lambda: check(plan, opened, devices))

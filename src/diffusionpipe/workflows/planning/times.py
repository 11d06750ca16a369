"""The times of a plan file: with a profile and a cluster that are named, or with the files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.workflows.telling import SILENCE

if TYPE_CHECKING:
    from diffusionpipe import viz
    from diffusionpipe.costs import ModelGraph, Profile
    from diffusionpipe.holding.workload import Workload
    from diffusionpipe.ir import Plan, Timeline
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.search.proposal import Proposal
    from diffusionpipe.workflows.telling import Telling


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """The predicted timeline of a plan, with the origin of its times in words."""

    source: str
    """The origin of the times in words."""
    timeline: Timeline
    axis: viz.TimeAxis
    """The unit of the times: milliseconds, or units where nothing is known."""
    setting: Setting | None = None
    """The planner's setting of the plan's training; None where no profile is known."""
    proposal: Proposal | None = None
    """The plan's simulation with its update and memory; None where no profile is known."""
    missing: str = ""
    """The options of `plan show` that would say more, and about what; "" where nothing is missing."""
    workload: str = ""
    """The assumptions about the training besides the model, in words."""


def given_times(plan: Plan, plan_file: Path, profile: Path, cluster: str, used: Sequence[int]) -> PlanTimes:
    """The predicted times of a plan, simulated with a profile and a cluster that the user names.

    `used`: the ranks of the cluster to use; () for all.

    Raises:
        ConfigError: the profile is for another model, or the cluster does not suit it or the plan.
        FileFormatError: the profile cannot be read.
    """
    from diffusionpipe.costs.clusters import check_ranks, load_cluster
    from diffusionpipe.costs.files import check_device, read_profile
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.planning.stated_setting import stated_setting
    from diffusionpipe.workflows.planning.used_devices import used_of

    loaded, machines = read_profile(profile), load_cluster(cluster)
    check_device(loaded, machines, source=str(profile))
    _check_kept(plan, loaded, profile)
    machines = used_of(machines, used, source="--use")
    check_ranks(machines, plan.mesh.num_ranks, source=str(plan_file))
    setting = stated_setting(
        loaded, machines, plan.batch, checkpoint=plan.checkpointed, has_ema=False, optimizer="AdamW"
    )
    if misfit := _misfit(plan, setting.graph):
        raise ConfigError(
            f"{profile} was made for another model: {misfit}; give the profile from which the plan was made"
        )
    return _predicted(plan, setting, f"simulated with {profile} and {cluster}", "AdamW without a moving average")


def _check_kept(plan: Plan, profile: Profile, path: Path) -> None:
    from diffusionpipe.costs.files import check_kept

    if plan.train.splits_backwards:
        check_kept(profile, source=str(path))


def _predicted(plan: Plan, setting: Setting, source: str, workload: str) -> PlanTimes:
    from diffusionpipe import viz
    from diffusionpipe.planner.pricing.storing import stored_as
    from diffusionpipe.planner.search.proposal import predict

    # The plan says where its frozen weights rest; its time and memory follow from that.
    setting = stored_as(setting, plan.encoders)
    proposal = predict(setting, plan.train, plan.blocks, plan.mesh)
    return PlanTimes(
        source=source,
        timeline=proposal.timeline,
        axis=viz.MILLISECONDS,
        setting=setting,
        proposal=proposal,
        workload=workload,
    )


def found_times(plan: Plan, plan_file: Path, tell: Telling = SILENCE, *, needs_recipe: bool = True) -> PlanTimes:
    """The predicted times of a plan, by the files beside it; without any, in equal units.

    `needs_recipe`: whether a recipe of another version beside it is an error; else it is not used, and that is said.
    """
    from diffusionpipe import viz
    from diffusionpipe.simulator import simulate, uniform_costs
    from diffusionpipe.workflows.planning.prediction_file import read_prediction

    beside = _setting_beside(plan, plan_file, tell, needs_recipe=needs_recipe)
    if beside is not None:
        setting, files, workload = beside
        return _predicted(plan, setting, f"simulated with {files} beside the plan", workload)
    options = "--profile and --cluster"
    predicted = read_prediction(plan_file, plan)
    if predicted is not None:
        source, missing = "the prediction beside the plan", f"{options} for memory and update"
        return PlanTimes(source=source, timeline=predicted, axis=viz.MILLISECONDS, missing=missing)
    source = "no profile: times are equal units (forward 1, backward 2, encoding 1)"
    timeline = simulate(plan.train, uniform_costs(plan.train))
    return PlanTimes(source=source, timeline=timeline, axis=viz.UNITS, missing=options)


def _setting_beside(
    plan: Plan, plan_file: Path, tell: Telling, *, needs_recipe: bool
) -> tuple[Setting, str, str] | None:
    """(planner's setting, names of the files that give it, training in words), from files beside the plan file.

    None without a profile of the plan's model.
    """
    from dataclasses import replace

    from diffusionpipe.costs.clusters import check_ranks, load_cluster
    from diffusionpipe.costs.files import check_device, read_profile
    from diffusionpipe.errors import RecipeError
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.workflows.planning.stated_setting import stated_setting

    profile, cluster, recipe = (plan_file.with_name(name) for name in ("profile.json", "cluster.json", "recipe.toml"))
    if not profile.is_file():
        return None
    loaded, files = read_profile(profile), ["profile.json"]
    if _misfit(plan, loaded.graph):
        tell.say(f"note: {profile} was made for another model and is not used")
        return None
    found = setting_of(loaded, plan.mesh, plan.batch, checkpointed=plan.checkpointed).cluster
    if cluster.is_file():
        found = load_cluster(str(cluster))
        files.append("cluster.json")
        check_ranks(found, plan.mesh.num_ranks, source=str(plan_file))
    check_device(loaded, found, source=str(profile))
    _check_kept(plan, loaded, profile)
    setting = stated_setting(loaded, found, plan.batch, checkpoint=plan.checkpointed, has_ema=False, optimizer="AdamW")
    training = "AdamW without a moving average"
    if recipe.is_file():
        try:
            setting = replace(setting, workload=_workload_of(recipe, plan, loaded.graph))
        except RecipeError as error:
            if needs_recipe:
                raise
            tell.say(f"note: {recipe} is not used: {error}")
        else:
            training = "the recipe's training"
            files.append("recipe.toml")
    return setting, " and ".join([", ".join(files[:-1]), files[-1]] if files[1:] else files), training


def _workload_of(recipe: Path, plan: Plan, graph: ModelGraph) -> Workload:
    """The workload of the recipe in the file beside a plan, with the plan's recomputed layers."""
    from dataclasses import replace

    from diffusionpipe.holding import DEVICE
    from diffusionpipe.trainer.model.workload import workload_of
    from diffusionpipe.trainer.recipe import recorded_recipe

    workload = workload_of(recorded_recipe(recipe), graph)
    return replace(workload, checkpointed=plan.checkpointed, encoders=DEVICE)


def _misfit(plan: Plan, graph: ModelGraph) -> str | None:
    """A clause why a model is not the plan's: it lacks layers or has another order of them; None if it is."""
    known = {layer.name for layer in graph.layers}
    if unknown := [name for block in plan.blocks for name in block if name not in known]:
        return f"it lacks {len(unknown)} of the plan's layers, e.g. {unknown[0]}"
    order = graph.backbone_layers
    for block in plan.blocks:
        trained = [name for name in block if name in order]
        first = order.index(trained[0]) if trained else 0
        if order[first : first + len(trained)] != tuple(trained):
            return f"its layers from {trained[0]} on come in another order than the plan's"
    return None

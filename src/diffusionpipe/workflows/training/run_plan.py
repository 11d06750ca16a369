"""The plan that a run's recipe asks for, made on rank 0, with the reason in the log where it was searched."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster, ModelGraph, Profile
    from diffusionpipe.ir import Plan
    from diffusionpipe.planner.assembly.layout import BackboneLayout, Layout
    from diffusionpipe.trainer.recipe import Recipe

logger = logging.getLogger(__name__)


def make_plan(
    model: ModelGraph,
    recipe: Recipe,
    num_ranks: int,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """The plan of a recipe's [pipeline] section for `num_ranks` ranks: searched, or built from the stated sizes.

    With a `profile` stages are cut by its times, else by the number of layers.

    Raises:
        ConfigError: the sizes do not fit the model, or nothing fits in memory.
    """
    from diffusionpipe.planner import build_plan, plan_from_profile
    from diffusionpipe.planner.choosing.explain import slow_links_text

    if recipe.pipeline.is_searched and profile is not None and cluster is not None:
        return searched_plan(recipe, profile, cluster)
    layout = _layout(recipe, num_ranks)
    if profile is None:
        return build_plan(model, layout)
    # Stated sizes may put the border of two stages on a slow link.
    if cluster is not None and (slow := slow_links_text(cluster)):
        logger.warning("%s", slow)
    return plan_from_profile(profile, layout, cluster)


def check_ranks(model: ModelGraph, recipe: Recipe, num_ranks: int) -> None:
    """Refuses ranks that the model's layers and the batch cannot occupy, before any of them is started.

    A plan file is left to rank 0, which reads it.

    Raises:
        ConfigError: there are too many, with how many layers there are for them.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.assembly.layout_check import check_layout
    from diffusionpipe.planner.search.places import is_cuttable
    from diffusionpipe.planner.search.search import uncuttable_batch
    from diffusionpipe.workflows.planning.recipe_setting import given_of

    if recipe.pipeline.plan_file is not None:
        return
    if not recipe.pipeline.is_searched:
        check_layout(model, _layout(recipe, num_ranks))
        return
    batch, num_layers = recipe.training.batch, len(model.backbone_layers)
    is_one = len(model.backbones) == 1  # two are cut in other ways, which the search knows
    if is_one and not is_cuttable(given_of(recipe), batch=batch, num_ranks=num_ranks, num_layers=num_layers):
        raise ConfigError(uncuttable_batch(batch, num_ranks, num_layers))


def _layout(recipe: Recipe, num_ranks: int) -> Layout:
    """The layout of `num_ranks` ranks with the sizes in a recipe's section [pipeline] or in its file of orders."""
    from diffusionpipe.ir import Sharded
    from diffusionpipe.planner import Layout
    from diffusionpipe.trainer.model.workload import samples_drawn_together
    from diffusionpipe.trainer.recipe import replicas_of_stages
    from diffusionpipe.workflows.training.recipe_orders import orders_of

    replicas, sizes = replicas_of_stages(recipe.pipeline, num_ranks), recipe.pipeline.sizes
    return Layout(
        batch=recipe.training.batch,
        stages=len(replicas),
        microbatches=sizes.microbatches,
        schedule=sizes.schedule,
        backbones=_backbone_layouts(recipe),
        orders=orders_of(recipe.pipeline, num_ranks),
        replicas=replicas,
        data_parallel=sizes.data_parallel,
        sharded=sizes.sharded,
        buckets=0 if sizes.sharded is Sharded.ALL else 1,
        encode_chunk=sizes.encode_chunk,
        encoders=sizes.encoders,
        splits=recipe.pipeline.splits,
        checkpointed=recipe.training.recomputed,
        sample_batch=samples_drawn_together(recipe),
        versions=recipe.pipeline.versions,
        delay=recipe.pipeline.delay or 1,
    )


def _backbone_layouts(recipe: Recipe) -> tuple[BackboneLayout, ...]:
    """The name and number of micro-batches of each model that a recipe trains together; () for a single model."""
    from diffusionpipe.planner.assembly.layout import BackboneLayout

    default = recipe.pipeline.sizes.microbatches
    return tuple(
        BackboneLayout(name=name, microbatches=own.microbatches or default) for name, own in recipe.models.items()
    )


def searched_plan(recipe: Recipe, profile: Profile, cluster: Cluster) -> Plan:
    """The fastest plan that the search finds; it logs its figures and the reason, and keeps the alternatives in a file.

    The file of alternatives is in the run's folder.

    Raises:
        ConfigError: nothing fits in memory.
    """
    from diffusionpipe.planner.choosing.asking import InWords
    from diffusionpipe.planner.choosing.choice import with_alternatives
    from diffusionpipe.trainer.model.workload import samples_drawn_together
    from diffusionpipe.trainer.recipe import PLAN
    from diffusionpipe.workflows.planning.alternatives_file import write_alternatives
    from diffusionpipe.workflows.planning.question import PlanQuestion, answered
    from diffusionpipe.workflows.planning.recipe_setting import may_recompute, restriction_of, setting_of

    asking, fill = InWords(tuple(sorted(recipe.pipeline.use))), recipe.pipeline.fill
    asked = PlanQuestion(
        setting=setting_of(recipe, profile, cluster),
        fill=fill,
        recipe=recipe,
        batches=(recipe.training.batch,),
        may_recompute=may_recompute(recipe),
        used=asking.used,
    )
    _, choice = answered(asked, asking)
    proposal = choice.proposal
    times = proposal.iteration + proposal.update, proposal.iteration, proposal.update  # without data workers
    line = 'plan="%s" simulated_step_s=%.4f simulated_iteration_s=%.4f simulated_update_s=%.4f'
    logger.info(line, choice.sizes, *times)
    comparison = with_alternatives(choice.comparison(), choice, fill=fill, asking=asking)
    for text in (comparison.verdict, *comparison.remarks):
        logger.info("%s", text)
    if restriction := restriction_of(recipe):
        logger.info("%s", restriction)
    plan = choice.plan(sample_batch=samples_drawn_together(recipe))
    # The plan is written later, by the caller; its alternatives are known only here.
    recipe.run.folder.mkdir(parents=True, exist_ok=True)
    write_alternatives(comparison, plan, recipe.run.folder / PLAN)
    return plan

"""A recipe as the search for plans needs it: the setting, the sizes that it fixes, and checks of both."""

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.clusters import computes_in_bfloat16
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.pricing.given import NOTHING, Given, check_given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.recipe import PipelineSection, Recipe, decided
from diffusionpipe.workflows.planning.used_devices import allowed_of


def given_of(recipe: Recipe) -> Given:
    """The sizes of the layout that a recipe with `plan = "auto"` fixes; no sizes for any other recipe."""
    return given_sizes(recipe.pipeline) if recipe.pipeline.is_searched else NOTHING


def given_sizes(pipeline: PipelineSection) -> Given:
    """The sizes of the layout that the recipe's section [pipeline] fixes."""
    return Given(
        stages=pipeline.stages,
        microbatches=pipeline.microbatches,
        schedule=pipeline.schedule,
        data_parallel=pipeline.data_parallel,
        sharded=pipeline.parts,
        encoders=pipeline.place_of_encoders,
    )


def setting_of(recipe: Recipe, profile: Profile, cluster: Cluster) -> Setting:
    """The planner's setting: a recipe's training on a cluster, with as much of its memory as the recipe allows."""
    allowed = allowed_of(cluster, recipe.pipeline.memory)
    workload = workload_of(recipe, profile.graph)
    return Setting(profile=profile, cluster=allowed, workload=workload, given=given_of(recipe))


def decided_for(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with its values "auto" of precision and storage decided for a cluster's devices.

    Raises:
        RecipeError: it states a storage of weights that its precision on these devices would round.
    """
    return decided(recipe, has_bfloat16=computes_in_bfloat16(cluster))


def may_recompute(recipe: Recipe) -> bool:
    """Whether the planner may have all layers recomputed: the recipe leaves activation_checkpointing open."""
    return recipe.training.activation_checkpointing is None


def check_search(recipe: Recipe, num_ranks: int) -> None:
    """Check, before anything is measured, that the recipe's sizes can be found by a search on `num_ranks` ranks.

    Raises:
        ConfigError: the sizes do not fit each other, the batch or the ranks.
    """
    if len(recipe.models) > 2:
        raise ConfigError(
            f"sizes are searched for two models, and this recipe has {', '.join(recipe.models)}; give the sizes in "
            "[pipeline], or plan for a recipe with two of them"
        )
    check_given(given_of(recipe), batch=recipe.training.batch, num_ranks=num_ranks, num_backbones=len(recipe.backbones))


def restriction_of(recipe: Recipe) -> str:
    """One sentence on the keys of the recipe that restrict its search; "" if there are none."""
    pipeline = recipe.pipeline
    stated = {
        "data_parallel": pipeline.data_parallel,
        "sharded": pipeline.sharded,
        "stages": pipeline.stages,
        "microbatches": pipeline.microbatches,
        "schedule": pipeline.schedule,
        "fill": pipeline.fill,
        "offload_frozen": pipeline.offload_frozen,
        "memory": pipeline.memory,
    }
    keys = [f"{name} = {_toml(value)}" for name, value in stated.items() if value is not None]
    if not keys:
        return ""
    return (
        f"The recipe's [pipeline] section fixes {', '.join(keys)}: the search tries only layouts with these values. "
        "Others may be faster; remove a key to let the search choose it."
    )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)

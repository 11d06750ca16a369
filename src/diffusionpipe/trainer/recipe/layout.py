"""The ranks that train by a recipe, and the number of copies of each stage on them."""

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection


def ranks_that_train(pipeline: PipelineSection, num_started: int) -> tuple[int, ...]:
    """The started ranks that train, ascending: those that the recipe names in `pipeline.use`, or all.

    Raises:
        RecipeError: it names ranks that are not there.
    """
    lacking = [rank for rank in pipeline.use if rank >= num_started]
    if lacking:
        raise RecipeError(
            f"pipeline.use: there is no rank {', '.join(map(str, lacking))}, because {num_started} are started; start "
            f"{max(lacking) + 1}, or name others"
        )
    return tuple(sorted(pipeline.use)) or tuple(range(num_started))


def replicas_of_stages(pipeline: PipelineSection, num_ranks: int) -> tuple[int, ...]:
    """The number of replicas of each stage, in forward order, in one of the `data_parallel` equal pipelines.

    Raises:
        RecipeError: there are not enough ranks, or some would be left over.
    """
    copies = pipeline.sizes.data_parallel
    per_pipeline, rest = divmod(num_ranks, copies)
    if rest or not per_pipeline:
        raise RecipeError(
            f"pipeline.data_parallel: {num_ranks} ranks cannot form {copies} equal pipelines; use a multiple of "
            f"{copies} ranks"
        )
    num_units = sum(pipeline.replicas) or pipeline.stages or per_pipeline
    if num_units != per_pipeline:
        wanted = num_units * copies
        key = "replicas" if pipeline.replicas else "stages"
        raise RecipeError(
            f"pipeline.{key}: {copies} x {num_units} stages and replicas need {wanted} ranks; "
            f"there are {num_ranks}: start {wanted}, or change pipeline.stages, replicas or data_parallel"
        )
    return pipeline.replicas or (1,) * num_units

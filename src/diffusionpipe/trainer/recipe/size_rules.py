"""The sizes that a recipe wants, as rules for the assignment of pictures."""

from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.sizes.sizes import SizeRules
from diffusionpipe.trainer.recipe.schema import DataSection, Measure, Recipe


def rules_of(data: DataSection) -> SizeRules | None:
    """The rules by which each picture gets one of a recipe's sizes or is left out.

    None if all pictures have one size and none is left out.
    """
    if not data.has_sizes:
        return None
    return SizeRules(
        areas=data.areas,
        of_sources=data.areas_of_sources,
        most_cut=data.max_cut,
        min_side=data.min_side or 1,
        enlarge=data.enlarge,
    )


def sizes_of(data: DataSection) -> tuple[Clip, ...]:
    """All sizes of a recipe's samples, the one with the most tokens first; () if `rules_of` has no rules."""
    rules = rules_of(data)
    if rules is None:
        return ()
    # Of as many tokens the one that is most like a square, which is drawn where nothing else is said.
    return tuple(sorted(rules.sizes, key=lambda size: (-size.volume, abs(size.width - size.height), size.width)))


def run_of(recipe: Recipe) -> int:
    """The number of consecutive samples that have the same size: `data.same_size`, or the rows of a micro-batch.

    1 with `data.batching = "tokens"`; the whole batch with patches, and where the micro-batches are not known yet.
    """
    pipeline, batch = recipe.pipeline, recipe.training.batch
    if recipe.data.batching is Measure.TOKENS:
        return 1
    if recipe.data.patches is not None:
        return batch
    if recipe.data.same_size is not None:
        return recipe.data.same_size
    if pipeline.is_searched or pipeline.plan_file is not None:
        return batch  # its micro-batches are not known yet
    return max(1, batch // (pipeline.sizes.microbatches * pipeline.sizes.data_parallel))

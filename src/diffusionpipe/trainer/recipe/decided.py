"""Values that a recipe leaves to the machine: "auto", decided once where a run starts and kept in its folder.

    training.precision                  bfloat16 where every device has it, else float32
    model.frozen_dtype                  bfloat16 where the arithmetic is bfloat16, but for DoRA; else "none"
    training.activation_checkpointing   by the plan, where it is searched; else false
    pipeline.plan                       "auto" in a recipe without a key of [pipeline], where sizes can be searched

A recipe in the folder of a run states all values. One that was written before a key was there has the default of then.
"""

from pathlib import Path

from diffusionpipe.errors import RecipeError
from diffusionpipe.files.versions import upgraded
from diffusionpipe.trainer.old_documents import RECIPE
from diffusionpipe.trainer.recipe.model_section import FrozenDtype, is_narrow_store
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table, table_of_file
from diffusionpipe.trainer.recipe.schema import Recipe, too_wide
from diffusionpipe.trainer.recipe.training_section import KeptWeights, RecipePrecision
from diffusionpipe.trainer.recipe.weights_check import too_precise


def recorded_recipe(path: Path) -> Recipe:
    """The recipe in a recipe.toml of a run's folder, with the meaning that it had when it was written.

    Raises:
        RecipeError: it cannot be read, or this version does not have its keys.
    """
    return recipe_from_table(upgraded(table_of_file(path), 1, RECIPE), source=path)


def decided(recipe: Recipe, *, has_bfloat16: bool) -> Recipe:
    """The recipe with its "auto" precision and storage of frozen weights set, by whether all devices have bfloat16.

    The precision becomes bfloat16 or float32. Frozen weights are stored in bfloat16 where the precision is bfloat16 and
    the recipe does not train DoRA.

    Raises:
        RecipeError: it states frozen or trained weights in bfloat16, which layers in its precision would read with a
            loss.
    """
    training, model = recipe.training, recipe.model
    if training.precision is RecipePrecision.AUTO:
        chosen = RecipePrecision.BFLOAT16 if has_bfloat16 else RecipePrecision.FLOAT32
        training = training.model_copy(update={"precision": chosen})
    is_narrow = training.precision is RecipePrecision.BFLOAT16
    if training.weights is KeptWeights.BFLOAT16 and not is_narrow:
        raise RecipeError(f"training.weights: {too_precise(training.precision)}")
    if is_narrow_store(model.frozen_dtype) and not is_narrow:
        raise RecipeError(f"model.frozen_dtype: {too_wide(model, training.precision)}")
    if model.frozen_dtype is FrozenDtype.AUTO and not recipe.models:  # of several models there is no such key
        stored = FrozenDtype.BFLOAT16 if is_narrow and not recipe.lora.dora else None  # DoRA's norms read them exactly
        model = model.model_copy(update={"frozen_dtype": stored})
    return recipe.model_copy(update={"training": training, "model": model})


def continued(recipe: Recipe, before: Recipe) -> Recipe:
    """The recipe with the keys that it leaves open set as in `before`, the recipe of the run that it continues."""
    training, model = recipe.training, recipe.model
    if training.precision is RecipePrecision.AUTO:
        training = training.model_copy(update={"precision": before.training.precision})
    if training.activation_checkpointing is None:
        kept = before.training.activation_checkpointing
        training = training.model_copy(update={"activation_checkpointing": kept})
    if model.frozen_dtype is FrozenDtype.AUTO and training.precision is before.training.precision:
        model = model.model_copy(update={"frozen_dtype": before.model.frozen_dtype})
    return recipe.model_copy(update={"training": training, "model": model})


def planned(recipe: Recipe, checkpointed: tuple[str, ...], num_layers: int) -> Recipe:
    """The recipe with `training.activation_checkpointing` set to the layers that the plan recomputes, if it is "auto".

    `checkpointed`: names of these layers; `num_layers`: the number of layers of all trained blocks. If all are
    recomputed, the value is "*".
    """
    if recipe.training.activation_checkpointing is not None:
        return recipe
    chosen = ("*",) if checkpointed and len(checkpointed) == num_layers else checkpointed
    training = recipe.training.model_copy(update={"activation_checkpointing": chosen})
    return recipe.model_copy(update={"training": training})

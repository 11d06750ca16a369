"""`diffusionpipe export RUN --single-file OUT`: a run's model, whole or with its adapters merged, in one file."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe import Recipe


def single_file_of(run: Path, out: Path, variant: str | None = None) -> tuple[str, ...]:
    """Writes the model of a run or of a diffusers folder; returns the names of the components in the file.

    Adapters are added to the weights of their base model.

    Raises:
        ConfigError: there is no model, or it has no such form.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.parameters.lora_read import ADAPTERS
    from diffusionpipe.trainer.exports.single_file import write_single_file
    from diffusionpipe.trainer.recipe import load_recipe
    from diffusionpipe.workflows.run_recipe import recipe_of

    for folder in (run / "export", run):
        if (folder / "model_index.json").is_file():
            return write_single_file(folder, out, variant)
    recipe = recipe_of(run)
    if recipe.is_file() and any((folder / ADAPTERS).is_file() for folder in (run / "export", run)):
        return _merged(load_recipe(recipe), recipe.parent, out)
    raise ConfigError(
        f"{run} has no export/ of one model; give the folder of a finished run, or a diffusers folder"
        if run.is_dir()
        else f"there is no folder {run}; give a run's folder or a diffusers folder"
    )


def _merged(recipe: "Recipe", run: Path, out: Path) -> tuple[str, ...]:
    """The last checkpoint of a run of adapters, as a whole model.

    Raises:
        ConfigError: the run keeps no checkpoint.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
    from diffusionpipe.trainer.exports.run_export import export_checkpoint
    from diffusionpipe.trainer.exports.single_file import write_single_file

    checkpoint = latest(run)
    if checkpoint is None:
        raise ConfigError(f"{run} keeps no checkpoint with which its adapters could be merged; set lora.merge = true")
    merging = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"merge": True})})
    with TemporaryDirectory() as temporary:
        return write_single_file(export_checkpoint(merging, checkpoint, Path(temporary) / "export"), out)

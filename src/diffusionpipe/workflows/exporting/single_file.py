"""`diffusionpipe export RUN --single-file OUT`: a run's model, whole or with its adapters merged, in one file."""

from pathlib import Path
from tempfile import TemporaryDirectory


def single_file_of(run: Path, out: Path, variant: str | None = None) -> tuple[str, ...]:
    """Write the model of a run or of a diffusers folder as one file; returns the components in it.

    Adapters are added to the weights of their base model.

    Raises:
        ConfigError: there is no model, or it has no such form.
    """
    from diffusionpipe.trainer.exports.single_file import write_single_file

    folder = whole_folder(run)
    if folder is not None:
        return write_single_file(folder, out, variant)
    with TemporaryDirectory() as temporary:
        return write_single_file(merged_export(run, Path(temporary) / "export"), out)


def whole_folder(run: Path) -> Path | None:
    """The diffusers folder of a run's model, or the folder itself; None for a run of adapters.

    Raises:
        ConfigError: it is none of these.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.parameters.lora_read import ADAPTERS
    from diffusionpipe.workflows.drawing.run_recipe import recipe_of

    for folder in (run / "export", run):
        if (folder / "model_index.json").is_file():
            return folder
    if recipe_of(run).is_file() and any((folder / ADAPTERS).is_file() for folder in (run / "export", run)):
        return None
    raise ConfigError(
        f"{run} has no export/ of one model; give the folder of a finished run, or a diffusers folder"
        if run.is_dir()
        else f"there is no folder {run}; give a run's folder or a diffusers folder"
    )


def merged_export(run: Path, out: Path) -> Path:
    """Write the last checkpoint of a run of adapters as a whole model below `out`; returns its folder.

    Raises:
        ConfigError: the run keeps no checkpoint.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
    from diffusionpipe.trainer.exports.run_export import export_checkpoint
    from diffusionpipe.trainer.recipe.decided import recorded_recipe
    from diffusionpipe.workflows.drawing.run_recipe import recipe_of

    path = recipe_of(run)
    recipe, folder = recorded_recipe(path), path.parent
    checkpoint = latest(folder)
    if checkpoint is None:
        raise ConfigError(
            f"{folder} keeps no checkpoint with which its adapters could be merged; set lora.merge = true"
        )
    # The recipe may keep adapters apart; one file has no place for them.
    merging = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"merge": True})})
    return export_checkpoint(merging, checkpoint, out)

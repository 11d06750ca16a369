"""The sources of `diffusionpipe sample`: a run's export, its adapters, one of its checkpoints, or any folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe.model_section import FrozenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that draws: its diffusers folder, adapters and scheduler, and the model whose pictures it enlarges."""

    folder: Path
    """A diffusers folder."""
    adapters: Path | None
    """The folder of adapters that belong to it, if there are some."""
    scheduler: Mapping[str, object]
    name: str = ""
    """Name of the model in a cascade."""
    resolution: int | None = None
    """Side of its pictures; None: as the run's recipe or diffusers' pipeline says."""
    variant: str | None = None
    """Variant of the folder's weights, as `model.variant` of a recipe."""
    frozen: "FrozenStore" = None
    """The storage of frozen weights that its adapters were trained on."""
    before: "TrainedModel | None" = None
    """The model that draws the small pictures that this one reads; None for the first or only model."""

    @property
    def chain(self) -> "tuple[TrainedModel, ...]":
        """All models that draw one after the other, this one last."""
        return (*(self.before.chain if self.before is not None else ()), self)


def trained_model(run: Path, variant: str | None = None, config: str | None = None) -> TrainedModel:
    """The model to draw with: the export of a run, a diffusers folder, or one file.

    `variant`: of the weights that are read. `config`: the diffusers folder or hub id of a model in one file.

    Raises:
        ConfigError: there is none, or adapters whose base model is not known or not there.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.opening.folder import SINGLE, family_of, resolve_folder, scheduler_config
    from diffusionpipe.models.parameters.lora_read import ADAPTERS
    from diffusionpipe.workflows.drawing.run_recipe import recipe_of

    if run.is_file() and run.suffix.lower() == SINGLE and _holds_adapters(run):
        raise ConfigError(
            f"{run} holds adapters alone; give the run's folder, its export/ or a folder of its adapters/, or load "
            "them with diffusers' load_lora_weights"
        )
    if run.is_file() and config is None:
        raise ConfigError(
            f"{run} is a model in one file; give --config, the diffusers folder or hub id that has its configurations, "
            "tokenizers and scheduler"
        )
    if run.is_file():
        folder = resolve_folder(run, variant, config)
        return TrainedModel(folder=folder, adapters=None, scheduler=scheduler_config(folder), variant=variant)
    if config is not None:
        raise ConfigError(f"--config: it belongs to a model in one file, and {run} is none; leave it out")
    # A run's folder has its model in export/; any other folder is the model itself.
    for folder in (run / "export", run):
        if (folder / "model_index.json").is_file():
            if family_of(folder).augmentation is not None:
                raise ConfigError(
                    f"{folder} draws from small pictures; give the run that trained it after the model that draws "
                    "them, or use diffusers"
                )
            return TrainedModel(folder=folder, adapters=None, scheduler=scheduler_config(folder), variant=variant)
        if (folder / ADAPTERS).is_file():
            return with_adapters(folder, recipe_of(run))
    recipe = recipe_of(run)
    for folder in (run / "export", run):
        if any(folder.glob("*/model_index.json")) and recipe.is_file():
            return _cascade(folder, recipe)
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}; give a run's folder, a diffusers folder or a file")
    raise ConfigError(f"{run} holds no export/ yet: let the run finish (diffusionpipe train RECIPE --resume latest)")


def _holds_adapters(file: Path) -> bool:
    """Whether all tensors in a file have names of adapters."""
    from diffusionpipe.models.parameters.single_file.reading import shapes_in

    names = shapes_in(file)
    return bool(names) and all("lora" in name or name.endswith((".diff", ".alpha")) for name in names)


def _cascade(exports: Path, recipe: Path) -> TrainedModel:
    """The last of the models that a run trained together, in whose field `before` the others are.

    `exports`: the folder with a diffusers folder for each model. `recipe`: the run's recipe file.

    Raises:
        ConfigError: they do not draw one after the other, or the recipe is of one model or an export is missing.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.opening.folder import family_of, scheduler_config
    from diffusionpipe.trainer.inference.cascade_drawing import CascadeMember, check_chain
    from diffusionpipe.trainer.recipe import recorded_recipe

    loaded = recorded_recipe(recipe)
    if not loaded.models:
        raise ConfigError(f"{exports} holds several models, but {recipe} has one; give the folder of one of them")
    found: TrainedModel | None = None
    chain: list[CascadeMember] = []
    for name, section in loaded.models.items():
        folder, size = exports / name, loaded.alone(name).data.resolution
        # Recipes list the models of a cascade in the order in which they draw.
        config, before = scheduler_config(folder), chain[-1].resolution if chain else None
        low = None if family_of(folder).augmentation is None else section.low_resolution or before
        chain.append(CascadeMember(name=name, resolution=size, low=low))
        found = TrainedModel(folder=folder, adapters=None, scheduler=config, name=name, resolution=size, before=found)
    check_chain(chain)
    assert found is not None, "the recipe of several exports has several models"
    return found


def with_adapters(adapters: Path, recipe: Path) -> TrainedModel:
    """The base model of the adapters in a folder, with these adapters and the scheduler of the run's recipe.

    Raises:
        ConfigError: there is no such recipe, or its model cannot be read.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.model.members import folder_of, prediction_of
    from diffusionpipe.trainer.model.scheduler import sampling_scheduler
    from diffusionpipe.trainer.recipe import recorded_recipe

    if not recipe.is_file():
        raise ConfigError(
            f"{adapters} holds only adapters, and no recipe.toml beside it names their base model; give the run's "
            "folder, or load them with diffusers' load_lora_weights"
        )
    loaded = recorded_recipe(recipe)
    folder = folder_of(loaded)
    scheduler = sampling_scheduler(folder, prediction_of(loaded, folder), loaded.objective.shift)
    frozen = loaded.model.frozen_dtype
    return TrainedModel(
        folder=folder, adapters=adapters, scheduler=scheduler, variant=loaded.model.variant, frozen=frozen
    )


def model_after(run: Path, step: int, temporary: Path) -> TrainedModel:
    """The model of a run after a step: from its export, if it ended there, or from a checkpoint of that step.

    `temporary`: the folder into which a checkpoint is exported.

    Raises:
        ConfigError: the run keeps neither.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.parameters.lora_read import ADAPTERS
    from diffusionpipe.trainer.checkpoints.checkpoint_folder import saved_checkpoints
    from diffusionpipe.trainer.exports.run_export import export_checkpoint
    from diffusionpipe.trainer.recipe import recorded_recipe
    from diffusionpipe.workflows.drawing.run_recipe import recipe_of

    recipe = recipe_of(run)
    if not recipe.is_file():
        return trained_model(run)  # nothing says how long it was trained
    loaded, folder = recorded_recipe(recipe), recipe.parent
    if loaded.training.num_steps == step and (folder / "export").is_dir():
        return trained_model(folder)
    kept = {int(path.name.rpartition("-")[2]): path for path in saved_checkpoints(folder)}
    if step not in kept:
        named = ", ".join(map(str, sorted(kept))) or "none"
        raise ConfigError(
            f"{folder} no longer has the weights of step {step}, with which the picture was drawn; it keeps the "
            f"checkpoints of these steps: {named} (checkpoint.keep says how many)"
        )
    exported = export_checkpoint(loaded, kept[step], temporary / "export")
    return with_adapters(exported, recipe) if (exported / ADAPTERS).is_file() else trained_model(exported)

"""What a run exports, from its session or from its recipe alone."""

from pathlib import Path

from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.folder import resolve_folder
from diffusionpipe.models.objective import Prediction
from diffusionpipe.trainer.export import Export, export
from diffusionpipe.trainer.lora import lora_of
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.session import build_model, prediction_of


def export_settings(recipe: Recipe, folder: Path, model: ModelGraph, prediction: Prediction) -> Export:
    """How a run's checkpoints become diffusers folders; `folder` is the model that it trains."""
    trained = sorted({p.name.partition(".")[0] for p in model.parameters if p.is_trainable})
    return Export(
        source_model=folder,
        trained={name: f"{name}." for name in trained},
        prediction=prediction,
        shift=recipe.objective.shift,
        base_model=recipe.model.path,
        recipe=recipe,
        lora=lora_of(recipe),
        is_merged=recipe.lora.merge,
    )


def export_checkpoint(recipe: Recipe, checkpoint: Path, destination: Path) -> Path:
    """The export of one checkpoint of a run, as the run itself writes it at its end.

    Raises:
        ConfigError: the model's folder cannot be read, or the checkpoint is damaged or of another model.
    """
    folder = resolve_folder(recipe.model.path)
    _, model = build_model(recipe, folder, "cpu")
    return export(checkpoint, destination, export_settings(recipe, folder, model, prediction_of(recipe, folder)))

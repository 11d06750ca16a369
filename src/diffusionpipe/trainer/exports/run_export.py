"""Exports a run, from its session or from its recipe alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.trainer.exports.export import Export, export, export_adapters
from diffusionpipe.trainer.model.lora import lora_of
from diffusionpipe.trainer.model.members import Member, class_embeddings_of, folder_of, learns_variance, open_member
from diffusionpipe.trainer.recipe import Recipe

CHECKPOINT_ADAPTERS = "adapters"
"""The name of the folder in a run's folder that has the adapters of its checkpoints."""


def export_settings(member: Member) -> Export:
    """The settings with which `export` makes a diffusers folder of one of a run's models."""
    recipe, names = member.recipe, canonical_names(member.graph.components)
    trained = sorted({name.partition(".")[0] for p, name in names.items() if p.requires_grad})
    return Export(
        source_model=member.folder,
        variant=recipe.model.variant,
        trained={name: f"{member.component(name)}." for name in trained},
        prediction=member.prediction,
        untrained={name for p, name in names.items() if name.partition(".")[0] in trained and not p.requires_grad},
        fixed=class_embeddings_of(member),
        shift=recipe.objective.shift,
        has_learned_range=learns_variance(recipe, member.folder),
        base_model=recipe.model.path,
        self_conditioning=recipe.objective.self_conditioning > 0,
        is_placed=recipe.data.patches is not None,
        recipe=_alone(member),
        lora=lora_of(recipe),
        is_merged=recipe.lora.merge,
    )


def _alone(member: Member) -> Recipe:
    """The recipe of one model of several, with the value that it has taken from the model before it."""
    recipe = member.recipe
    if member.low is None:
        return recipe
    model = recipe.model.model_copy(update={"low_resolution": member.low.resolution})
    return recipe.model_copy(update={"model": model})


def adapters_of_checkpoints(recipe: Recipe, members: Sequence[Member]) -> Callable[[Path], None]:
    """A function that exports the adapters of the checkpoint at a path into the run's folder adapters/.

    The run has one model.
    """
    (member,) = members
    settings, modules = export_settings(member), member.graph.components

    def export_them(checkpoint: Path) -> None:
        export_adapters(checkpoint, recipe.run.folder / CHECKPOINT_ADAPTERS / checkpoint.name, modules, settings)

    return export_them


def export_checkpoint(recipe: Recipe, checkpoint: Path, destination: Path) -> Path:
    """Exports one checkpoint of a run of one model, as the run does at its end, and returns the folder's path.

    Raises:
        ConfigError: the model's folder cannot be read, the checkpoint is damaged or of another model, or a file cannot
            be written.
    """
    member = open_member(recipe, folder_of(recipe))
    return export(checkpoint, destination, export_settings(member))

"""The note that a run has ended: all steps are done, and its results are complete. Then there is nothing to do.

runs/x/ended.json    {"checkpoint": "step-00002000", "merged": false}
"""

import json
from collections.abc import Iterable
from pathlib import Path

from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.model_section import LoraSection

EXPORT = "export"
_NOTE = "ended.json"
_INDEX = "README.md"
"""The last file of an export."""


def note_end(recipe: Recipe, checkpoint: Path) -> None:
    """Writes ended.json: the run has ended, and its export holds the weights of this checkpoint."""
    write_atomically(recipe.run.folder / _NOTE, json.dumps(_content(recipe, checkpoint)) + "\n")


def forget_end(folder: Path) -> None:
    """Removes ended.json from a run's folder, because the run trains again."""
    (folder / _NOTE).unlink(missing_ok=True)


def has_ended(recipe: Recipe, checkpoint: Path) -> bool:
    """Whether ended.json names this checkpoint and the recipe's settings of the export, and all exports are there."""
    folder = recipe.run.folder
    try:
        noted = read_json(folder / _NOTE)
    except (OSError, ValueError):
        return False
    return noted == _content(recipe, checkpoint) and all(path.is_file() for path in _exports(recipe))


_FILES = ("formats", "dora_as_difference", "save_dtype", "trigger")


def _content(recipe: Recipe, checkpoint: Path) -> dict[str, object]:
    return {"checkpoint": checkpoint.name, "merged": recipe.lora.merge, **_of_files(recipe.lora)}


def _of_files(lora: LoraSection) -> dict[str, object]:
    """Settings for the files of adapters; the defaults are left out, as in notes of earlier versions."""
    defaults = LoraSection(rank=None).model_dump(mode="json")
    own = lora.model_dump(mode="json")
    return {key: own[key] for key in _FILES if own[key] != defaults[key]}


def _exports(recipe: Recipe) -> Iterable[Path]:
    return (recipe.run.folder / EXPORT / name / _INDEX for name in recipe.backbones)

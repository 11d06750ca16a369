"""The note that a run has ended: all steps are done, and its results are complete. Then there is nothing to do.

runs/x/ended.json    {"format": 2, "checkpoint": "step-00002000", "merged": false, "formats": ["diffusers"], ...}
"""

import json
from collections.abc import Iterable
from pathlib import Path

from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.files.versions import upgraded
from diffusionpipe.trainer.old_documents import ENDED, FORMAT
from diffusionpipe.trainer.recipe import Recipe

EXPORT = "export"
_NOTE = "ended.json"
_INDEX = "README.md"
"""The name of the last file that an export writes."""


def note_end(recipe: Recipe, checkpoint: Path) -> None:
    """Writes ended.json: the run has ended, and its export holds the weights of this checkpoint."""
    write_atomically(
        recipe.run.folder / _NOTE, json.dumps({FORMAT: len(ENDED) + 1, **_content(recipe, checkpoint)}) + "\n"
    )


def forget_end(folder: Path) -> None:
    """Removes ended.json from a run's folder, because the run trains again."""
    (folder / _NOTE).unlink(missing_ok=True)


def has_ended(recipe: Recipe, checkpoint: Path) -> bool:
    """Whether ended.json names this checkpoint and the recipe's settings of the export, and all exports are there."""
    folder = recipe.run.folder
    try:
        found = read_json(folder / _NOTE)
        noted = upgraded(found, found.pop(FORMAT, 1), ENDED) if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return False
    return noted == _content(recipe, checkpoint) and all(path.is_file() for path in _exports(recipe))


_FILES = ("formats", "dora_as_difference", "save_dtype", "trigger")


def _content(recipe: Recipe, checkpoint: Path) -> dict[str, object]:
    files = recipe.lora.model_dump(mode="json", include=set(_FILES))
    return {"checkpoint": checkpoint.name, "merged": recipe.lora.merge, **files}


def _exports(recipe: Recipe) -> Iterable[Path]:
    return (recipe.run.folder / EXPORT / name / _INDEX for name in recipe.backbones)

"""Frames of a second of the clips that a run trains on and draws, in one place for all that use it.

`data.frame_rate` says how many are taken. Without it each clip has its own rate, and the middle one is drawn:

    RUN/clips.json      {"frame_rate": 23.976}
"""

import json
from pathlib import Path

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.input_file import read_text
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.recipe import Recipe

FILE = "clips.json"
_KEY = "frame_rate"
_MOST = 1e6


def drawn_rate(recipe: Recipe, train: Dataset) -> float | None:
    """Frames of a second of the clips that the run draws: the recipe's, or its data's middle one; None for pictures."""
    if not recipe.data.has_clips:
        return None
    return train.rate if recipe.data.frame_rate is None else recipe.data.frame_rate


def write_rate(folder: Path, rate: float | None) -> None:
    """Writes the rate as clips.json into the run's folder, for drawings after the run; nothing for None."""
    if rate is not None:
        write_atomically(folder / FILE, json.dumps({_KEY: rate}) + "\n")


def kept_rate(folder: Path) -> float | None:
    """The rate that the run in the folder draws; None where it draws pictures, or is of an older version.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        rate = json.loads(read_text(path))[_KEY]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error!r}; remove it") from error
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < _MOST:
        raise ConfigError(f"{path}: {_KEY} must be a number above 0; remove the file")
    return float(rate)

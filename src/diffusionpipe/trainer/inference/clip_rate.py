"""The frames per second of the clips that a run trains on and draws.

`data.frame_rate` says how many are taken. Without it each clip has its own rate, and drawn clips have the median rate:

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
    """The frames per second of the clips that the run draws; None for pictures.

    They are the recipe's, or else the median of the data's.
    """
    if not recipe.data.has_clips:
        return None
    return train.rate if recipe.data.frame_rate is None else recipe.data.frame_rate


def write_rate(folder: Path, rate: float | None) -> None:
    """Writes the frames per second as clips.json into the run's folder, for later drawings; writes nothing for None."""
    if rate is not None:
        write_atomically(folder / FILE, json.dumps({_KEY: rate}) + "\n")


def kept_rate(folder: Path) -> float | None:
    """The frames per second that a run's folder states in clips.json; None if it has no such file.

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

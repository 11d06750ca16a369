"""The components of a diffusers folder by its files alone: recipes are checked against it before torch is imported."""

from pathlib import Path

from diffusionpipe.files.input_file import read_json
from diffusionpipe.ir.home import expanded_path


def components_of_folder(path: str) -> tuple[str, ...]:
    """The names of the components with weights in a local folder; () where the path is none, or cannot be read.

    A hub id and a model in one file are () too: their parts are known when they are opened.
    """
    try:
        folder = expanded_path(Path(path))
        index = read_json(folder / "model_index.json")
    except (OSError, ValueError):
        return ()
    if not isinstance(index, dict):
        return ()
    return tuple(name for name in index if (folder / name / "config.json").is_file())

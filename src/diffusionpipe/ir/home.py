"""One rule for every path that users write: a "~" at its start is their home folder, as in a shell.

A shell itself does not replace it in `key=~/x` and `--out=~/x`, nor does anything in a recipe.
"""

import os
from pathlib import Path


def expanded(path: str) -> str:
    """The path with the user's home folder in place of a leading "~", or NAME's home folder in place of "~NAME".

    Raises:
        ValueError: there is no such home folder.
    """
    full = os.path.expanduser(path)
    if path.startswith("~") and full == path:
        name = path.partition("/")[0]
        raise ValueError(f"there is no home folder {name}; give the whole path of a folder whose name begins with ~")
    return full


def expanded_path(path: Path) -> Path:
    """The path with the home folder in place of a leading "~", as `expanded` does it; others are returned as they are.

    `Path` removes a leading "./", so "./~" counts as "~".

    Raises:
        ValueError: there is no such home folder.
    """
    return Path(expanded(str(path))) if str(path).startswith("~") else path

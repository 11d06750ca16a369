"""Which paths are folders of runs, and for the others the path to give in their place."""

from __future__ import annotations

import tomllib
from pathlib import Path

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.input_file import read_text
from diffusionpipe.trainer.recipe import PLAN
from diffusionpipe.trainer.reporting.metrics import METRICS
from diffusionpipe.workflows.report.recipe import RECIPE

_OF_A_RUN = (RECIPE, METRICS, PLAN, "checkpoints", "samples", "data.json")
_BEFORE = ("run.lock", "cluster.json", "profile.json", "logs")
"""Names of which one shows that a job measures and plans in a folder: they are written before the recipe."""
_LISTED = 3


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder: its job has made a plan."""
    return any((folder / name).exists() for name in _OF_A_RUN)


def check_run(folder: Path) -> None:
    """Check that a run has begun in this folder.

    Raises:
        ConfigError: none has; the message says what to give.
    """
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no {RECIPE}, no {METRICS} and no {PLAN}; "
            f"{_runs_in(folder) or 'give the folder that the recipe names as run.folder'}"
        )


def check_run_to_come(path: Path) -> None:
    """Check that a path can be the folder of a run, now or later; it need not exist.

    Raises:
        ConfigError: it is a file or a folder of other things; the message names the folder to give.
    """
    if path.is_dir():
        if any(path.iterdir()) and not any((path / name).exists() for name in _BEFORE):
            check_run(path)
    elif path.exists() or path.suffix in (".toml", ".json"):
        raise ConfigError(f"{path} is not a folder; {of_a_recipe(path) or _of_a_file(path)}")


def of_a_recipe(path: Path) -> str:
    """A text for errors that names the run folder of the recipe at this path; "" for other than .toml files."""
    try:
        run = tomllib.loads(read_text(path)).get("run") if path.suffix == ".toml" else None
    except (OSError, ValueError, RecursionError):
        run = None
    if isinstance(run, dict) and isinstance(run.get("folder"), str):
        return f"it is a recipe: give the folder that it names as run.folder, {run['folder']}"
    return "give the folder that this recipe names as run.folder" if path.suffix == ".toml" else ""


def _of_a_file(path: Path) -> str:
    shows = f"; `diffusionpipe report {path}` shows a plan file" if path.suffix == ".json" else ""
    return f"give the folder that the recipe names as run.folder{shows}"


def _runs_in(folder: Path) -> str:
    """A remedy for errors that names some runs in a folder; "" if it has none."""
    found = [str(one) for one in sorted(folder.glob("*/")) if one.is_dir() and is_run(one)]
    more = ", ..." if len(found) > _LISTED else ""
    return f"give a run.folder in it: {', '.join(found[:_LISTED])}{more}" if found else ""

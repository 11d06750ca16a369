"""How a run draws pictures: from the recipe in its folder, which may be a stranger's."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe import Precision, SamplingSection


def sampling_of(run: Path) -> "SamplingSection":
    """[sampling] of the run's recipe, or its defaults.

    Raises:
        ConfigError: the recipe cannot be read, or the section is wrong; the message names the file and the key.
    """
    from pydantic import ValidationError

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import SamplingSection

    recipe = recipe_of(run)
    values = _table(recipe).get("sampling", {})
    try:
        return SamplingSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("sampling", *map(str, first["loc"])))
        raise ConfigError(f"{recipe}: {key}: {first['msg']}; correct it, or remove the section [sampling]") from error


def resolution_of(run: Path, folder: Path) -> int:
    """The resolution that the run was trained at, or that of diffusers' pipeline.

    Raises:
        ConfigError: the run's recipe does not name one.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.pipeline_defaults import default_resolution

    recipe = recipe_of(run)
    if not recipe.is_file():
        return default_resolution(folder)
    data = _table(recipe).get("data")
    resolution = data.get("resolution") if isinstance(data, dict) else None
    if not isinstance(resolution, int) or isinstance(resolution, bool) or resolution < 1:
        raise ConfigError(
            f"{recipe}: data.resolution must be a whole number of at least 1; correct it, or give --resolution"
        )
    return resolution


def precision_of(run: Path) -> "Precision":
    """The precision that the run was trained in; float32 where there is no run.

    Raises:
        ConfigError: the run's recipe names none that there is.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import Precision

    recipe = recipe_of(run)
    training = _table(recipe).get("training", {})
    named = training.get("precision", Precision.FLOAT32) if isinstance(training, dict) else training
    if named not in list(Precision):
        known = ", ".join(Precision)
        raise ConfigError(f"{recipe}: training.precision must be one of {known}; correct it, or give --precision")
    return Precision(str(named))


def validation_of(run: Path) -> Path | None:
    """The folder of the run's validation data; None where there is no run, or it has none.

    Raises:
        ConfigError: the run's recipe cannot be read.
    """
    data = _table(recipe_of(run)).get("data")
    folder = data.get("validation") if isinstance(data, dict) else None
    return Path(folder) if isinstance(folder, str) and folder != "none" else None


def recipe_of(run: Path) -> Path:
    """Where the resolved recipe of a run or of its export/ is."""
    own = run / "recipe.toml"
    return own if own.is_file() else run.parent / "recipe.toml"


def _table(recipe: Path) -> dict[str, object]:
    """The sections of a recipe's file, empty where there is none."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.input_file import read_text

    if not recipe.is_file():
        return {}
    try:
        return tomllib.loads(read_text(recipe))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{recipe}: cannot be read: {error}; restore or remove it") from error
    except RecursionError:
        raise ConfigError(f"{recipe}: cannot be read: it is nested too deeply; restore or remove it") from None

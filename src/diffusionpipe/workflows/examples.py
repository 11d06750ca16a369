"""`diffusionpipe example NAME`: the examples that the package carries, written where their commands find them."""

import shutil
from pathlib import Path

from diffusionpipe.errors import ConfigError

_RECIPES = "recipes"
_PACKAGED, _CHECKOUT = Path(__file__).parents[1] / "examples", Path(__file__).parents[3] / "examples"
"""The folder of the examples in an installed package, and the folder in a checkout."""


def examples() -> dict[str, Path]:
    """Name -> the folder or the recipe file of each example in the package; folders come first."""
    home = next((folder for folder in (_PACKAGED, _CHECKOUT) if (folder / _RECIPES).is_dir()), None)
    if home is None:
        raise ConfigError("this installation has no examples; install the package again, or use a checkout")
    folders = {path.name: path for path in sorted(home.iterdir()) if path.is_dir() and path.name != _RECIPES}
    return folders | {path.stem: path for path in sorted((home / _RECIPES).glob("*.toml"))}


def write_example(name: str, into: Path) -> Path:
    """Write an example below the folder `into`, where its own commands find it; returns its path.

    Folders go to examples/NAME, recipes to examples/recipes/NAME.toml.

    Raises:
        ConfigError: there is no such example, the place is taken, or it cannot be written.
    """
    known = examples()
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=3)
        words = f"the nearest: {', '.join(near)}" if near else "`diffusionpipe example` lists all"
        raise ConfigError(f"there is no example {name!r}; {words}")
    source = known[name]
    place = into / "examples" / (name if source.is_dir() else f"{_RECIPES}/{source.name}")
    if place.exists():
        raise ConfigError(f"{place} exists; give another folder by --into")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, place)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}; choose another place") from error
    return place


def first_words(path: Path) -> str:
    """The subject of the example at `path`: the first line of its recipe, or without one the names of its files."""
    recipe = path / "recipe.toml" if path.is_dir() else path
    if not recipe.is_file():
        return ", ".join(sorted(one.name for one in path.iterdir()))
    line = recipe.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return line.partition("`: ")[2] if line.startswith("`make") else line  # a checkout's command for the same


def commands_of(place: Path) -> list[str]:
    """The commands in the comments of an example's recipe; [] without a recipe."""
    recipe = place / "recipe.toml" if place.is_dir() else place
    if not recipe.is_file():
        return []
    lines = [line.lstrip("# ") for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [line for line in lines if line.startswith(("python ", "diffusionpipe "))]

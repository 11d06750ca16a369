"""The recipe of a run as rows of a page, and the keys in which several runs differ."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffusionpipe.files.input_file import read_text
from diffusionpipe.workflows.report.figures import Json

RECIPE = "recipe.toml"
_SECRET = re.compile(r"(^|[_.-])(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_TOKEN = re.compile(r"\b(hf_\w{16,}|sk-[\w-]{16,}|[0-9a-f]{40})\b|(?<=://)[^/\s@]+@")
"""Tokens of known services, and the user and password of an address."""
LEFT_OUT = "(left out)"


def recipe_of(folder: Path) -> dict[str, object] | str:
    """Key ("training.batch") -> value of the recipe in a run's folder, without secrets; or the reason as a text.

    The file is read as it is, also if it has keys that are unknown to this version.
    """
    path = folder / RECIPE
    if not path.exists():
        return f"there is no {RECIPE}; the run has not begun, or the file was removed"
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        return f"{RECIPE} cannot be read: {error}"
    return dict(_flat(table))


def _flat(table: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found += _flat(value, f"{key}.")
        else:
            found.append((key, LEFT_OUT if _SECRET.search(name) else without_tokens(_plain(value))))
    return found


def _plain(value: object) -> object:
    """The value of a key for the page: a text or number as it is, any other value as a recipe writes it.

    >>> _plain(False), _plain(["a", "b"]), _plain(0.5)
    ('false', '["a", "b"]', 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


def without_tokens(value: object) -> object:
    """The value, with text that looks like a token or a password replaced, also inside lists and dictionaries."""
    return _TOKEN.sub(LEFT_OUT, value) if isinstance(value, str) else value


def rows_of(recipes: Sequence[Mapping[str, object]]) -> list[Json]:
    """The page's row for each key with its value in each recipe, keys that differ first; "" where a recipe lacks it.

    Keys that only some recipes have, as recipes of different versions do, come after the values that differ.
    """
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows: list[Json] = []
    for key in keys:
        values = [str(recipe.get(key, "")) for recipe in recipes]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=_place)


def _place(row: Json) -> tuple[bool, bool]:
    values = row["values"]
    return not row["differs"], isinstance(values, list) and "" in values

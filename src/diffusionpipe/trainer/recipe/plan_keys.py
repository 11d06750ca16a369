"""Keys that a plan file states for the recipe that trains by it: the recipe leaves them out, or agrees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir.files import read_plan
from diffusionpipe.trainer.recipe.overrides import Table
from diffusionpipe.trainer.recipe.section import of_user

_OPEN = (None, "auto")
_NO_FILE = (None, "none", "auto")


def with_plan_keys(table: Table) -> tuple[Table, list[tuple[str, str]]]:
    """(the recipe's table with the keys of its plan file that it leaves out, (key, line) of each key that differs).

    A line is the message about the key. Without a plan file, or with one that cannot be read, the table stays as it is:
    the checks of the run refuse such a file.
    """
    pipeline = table.get("pipeline", {})
    named = pipeline.get("plan") if isinstance(pipeline, dict) else None
    if named in _NO_FILE or not isinstance(named, str) or not named:
        return table, []
    try:
        stated = read_plan(Path(of_user(named))).made_with
    except (FileFormatError, ValueError):
        return table, []
    filled, problems = dict(table), list[tuple[str, str]]()
    for section, name, value in _values(stated):
        own = filled.get(section, {})
        if not isinstance(own, dict) or (section == "model" and "models" in table):  # several models have no [model]
            continue
        present = own.get(name)
        if present in _OPEN:
            filled[section] = {**own, name: value}
        elif present != value:
            key = f"{section}.{name}"
            text = f"the recipe has {present}, but the plan {named} was made for {value}; remove the key, or plan again"
            problems.append((key, f"{key}: {text}"))
    return filled, problems


def _values(stated: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of each recipe key among the settings, as text, with which a plan was made."""
    for text in stated:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        if not text.startswith("--") and name:  # options of the command that planned are not keys
            yield section, name, int(value) if value.isdecimal() else value

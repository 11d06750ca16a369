"""`key.path=value` from the command line, laid over the table of a TOML file."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Table = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overridden:
    """A recipe's table with overrides applied, their keys, and the overrides that could not be applied."""

    table: Table
    """The recipe's table with the overrides applied."""
    keys: frozenset[str]
    """The dotted keys that came from overrides."""
    problems: tuple[str, ...]
    """A sentence for each override that could not be applied."""


def override(table: Mapping[str, object], overrides: Sequence[str]) -> Overridden:
    """A copy of a recipe's table with each `key.path=value` of `overrides` set; of two for one key the later counts.

    A value is read as TOML; text that is not TOML, or too large or deep for it, is a string. So `data.train=pictures`
    needs no quotes. A text that is not `key.path=value`, or has a value in place of a section, becomes a problem.
    """
    result = _copy(table)
    keys, problems = set(), []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        path = key.split(".")
        if not equals or not all(path):
            problems.append(f"{text!r}: expected key.path=value, e.g. training.steps=100")
        elif blocked := _set(result, path, parse_value(value.strip())):
            problems.append(f"{text!r}: {blocked} is a value, not a section")
        else:
            keys.add(key)
    return Overridden(table=result, keys=frozenset(keys), problems=tuple(problems))


def parse_value(text: str) -> object:
    """The TOML value that `text` spells, or `text` itself where it spells none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # a text with line breaks may spell further keys


def _set(table: Table, path: Sequence[str], value: object) -> str | None:
    """Set a value in the table, in place; returns the dotted prefix of `path` that is not a table, None if all are."""
    for depth, name in enumerate(path[:-1], start=1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return ".".join(path[:depth])
        table = inner
    table[path[-1]] = value
    return None


def _copy(table: Mapping[str, object]) -> Table:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in table.items()}

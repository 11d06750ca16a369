"""The tables of keys in docs/recipe.md say what the schema of recipes takes."""

import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from diffusionpipe.trainer.recipe import SECTIONS
from diffusionpipe.trainer.recipe.section import Section

PAGE = Path(__file__).parents[2] / "docs/recipe.md"


def _script() -> ModuleType:
    spec = spec_from_file_location("make_keys", PAGE.parent / "make_keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
FIELDS = [(table, key) for table, section in SCRIPT.TABLES.items() for key in section.model_fields]


def cells(table: str, key: str) -> tuple[str, str]:
    """The values and the default that the page states for a key."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- keys of [{table}] -->\n")[2].partition("\n\n")[0]
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
    _, _, values, default, *_ = re.split(r" ?(?<!\\)\| ?", row)
    return values, default.replace("\\|", "|")


def read(table: str, key: str, value: object) -> Any:
    """A value as the field of a key reads it, without the rules between keys."""
    section = SCRIPT.TABLES[table]
    hint = get_type_hints(section, include_extras=True)[key]
    alone: Any = create_model("Alone", __config__=section.model_config, **{key: (hint, ...)})
    return getattr(alone.model_validate({key: value}), key)


def nested(section: type[Section]) -> set[type[Section]]:
    """The sections inside a section, at any depth."""
    waiting: list[Any] = [field.annotation for field in section.model_fields.values()]
    found: set[type[Section]] = set()
    while waiting:
        kind = waiting.pop()
        waiting += [one for one in get_args(kind) if not isinstance(one, FieldInfo)]
        if isinstance(kind, type) and issubclass(kind, Section) and kind not in found:
            found |= {kind, *nested(kind)}
    return found


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert SCRIPT.document(page) == page, "run make docs"


def test_each_section_has_a_table():
    marked = re.findall(r"<!-- keys of \[([\w.]+)\] -->", PAGE.read_text(encoding="utf-8"))
    assert sorted(marked) == sorted(SCRIPT.TABLES)
    assert {*SECTIONS.values()}.union(*map(nested, SECTIONS.values())) <= set(SCRIPT.TABLES.values())


@pytest.mark.parametrize(("table", "key"), FIELDS)
def test_the_stated_default_is_the_default(table, key):
    field = SCRIPT.TABLES[table].model_fields[key]
    _, stated = cells(table, key)
    assert (stated == "required") == (field.is_required() and (table, key) != ("run", "folder"))
    if stated.startswith("`") and not field.is_required():
        value = tomllib.loads(f"value = {stated.strip('`')}")["value"]
        assert read(table, key, value) == field.get_default(call_default_factory=True, validated_data={})


@pytest.mark.parametrize(("table", "key"), FIELDS)
def test_stated_words_and_ends_of_ranges_are_read_and_others_are_refused(table, key):
    values, _ = cells(table, key)
    for word in re.findall(r"`(\"[^`]*\"|true|false|\[[^`]*\])`", values):
        read(table, key, tomllib.loads(f"value = {word}")["value"])
    if key in ("resolution", "timesteps", "time_range"):  # ranges of the numbers in a list
        return
    for low, high in re.findall(r"(?:from|above) ([\d,]+) to (?:below )?([\d,]+)", values):
        least, most = (int(end.replace(",", "")) for end in (low, high))
        read(table, key, (least + most) // 2 if "whole" in values else (least + most) / 2)
        for beyond in (least - 1, most + 1):
            with pytest.raises(ValidationError):
                read(table, key, beyond)

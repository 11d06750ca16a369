"""Recipes as TOML files: reading, with every problem named at once, and writing.

[model]
path = "examples/digits/model"

[data]
train = "runs/digits-data/train"
resolution = 32

[training]
steps = 1000
batch = 64
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diffusionpipe.errors import RecipeError
from diffusionpipe.files.input_file import read_named
from diffusionpipe.trainer.recipe.group_section import ELSEWHERE, SWITCHED_OFF, GroupSection
from diffusionpipe.trainer.recipe.models_section import MemberSection, refused_with_models, without_models
from diffusionpipe.trainer.recipe.other_words import answer
from diffusionpipe.trainer.recipe.overrides import Table, override
from diffusionpipe.trainer.recipe.pipeline_section import AUTO, PipelineSection
from diffusionpipe.trainer.recipe.plan_keys import with_plan_keys
from diffusionpipe.trainer.recipe.schema import Check, Recipe, problems_between, why_not_searched
from diffusionpipe.trainer.recipe.section import Section

KeyPath: TypeAlias = tuple[str | int, ...]
_LONGEST = 200
"""The most characters of a value that a message shows in full."""

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def load_recipe(path: Path | str, overrides: Sequence[str] = (), checks: Sequence[Check] = ()) -> Recipe:
    """The recipe of a TOML file with `key.path=value` overrides; paths in it are relative to the current directory.

    `checks`: further functions that take sections of the recipe and yield problems.

    Raises:
        RecipeError: the file cannot be read, or keys or values are wrong; the message lists every problem.
    """
    path = Path(path)
    return recipe_from_table(table_of_file(path), overrides, source=path, checks=checks, follows_plan=True)


def table_of_file(path: Path) -> dict[str, Any]:
    """The sections of a recipe's TOML file, parsed and not yet validated.

    Raises:
        RecipeError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_named(path))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from error
    except ValueError as error:
        raise RecipeError(f"{path}: not a TOML file: {error}") from error
    except RecursionError:
        raise RecipeError(f"{path}: not a usable TOML file: it is nested too deeply") from None


def recipe_from_table(
    table: Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    source: Path | str,
    checks: Sequence[Check] = (),
    follows_plan: bool = False,
) -> Recipe:
    """The recipe of a parsed TOML file with `key.path=value` overrides.

    `source`: the path of the file, which gives the run's folder its default name. `checks`: further functions that take
    sections of the recipe and yield problems. `follows_plan`: whether keys that the recipe leaves out are taken from
    its plan file, if it has one.

    Raises:
        RecipeError: keys or values are wrong; the message lists every problem.
    """
    overridden = override(table, overrides)
    # The plan's keys come after the command line's, which may name the plan.
    followed, differing = with_plan_keys(overridden.table) if follows_plan else (overridden.table, [])
    full, models, wrong = without_models(_searched(_with_run_folder(followed, Path(source))))
    sections, problems = _validate(full)
    members, problems_of_members = _validate_models(models)
    problems += [*wrong, *problems_of_members, *differing]
    if models:
        problems.extend((line.partition(":")[0], line) for line in refused_with_models(members, sections))
    problems.extend((name, f"{name}: {_unknown((name,))}") for name in full if name not in SECTIONS)
    # A recipe that says nothing of the layout is searched, where it can be.
    if not full.get("pipeline") and all(name in sections for name in ("pipeline", "objective")):
        searched = PipelineSection(plan=AUTO)
        if not why_not_searched({**sections, "pipeline": searched, "models": members}):
            sections["pipeline"] = searched
    # After faults in [models], checks that read them would only repeat these.
    right = sections if wrong or problems_of_members else {**sections, "models": members}
    problems.extend((line.partition(":")[0], line) for line in problems_between(right, checks))
    lines = [*overridden.problems, *(line + _origin(key, overridden.keys) for key, line in problems)]
    if lines:
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise RecipeError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in lines))
    return Recipe(models=members, **sections)  # type: ignore[arg-type]  # keys and classes are those of Recipe's fields


def _searched(table: dict[str, object]) -> dict[str, object]:
    """The recipe's table, with `plan = "auto"` added if [pipeline] has only keys that do not decide the layout."""
    own = table.get("pipeline")
    if not isinstance(own, dict) or not own.keys() <= {"cluster", "memory", "use", "encoders", "cache"}:
        return table
    is_asked = any(own.get(key, "none") != "none" for key in ("cluster", "memory", "encoders"))
    return {**table, "pipeline": {"plan": AUTO, **own}} if is_asked else table


def recipe_to_toml(recipe: Recipe) -> str:
    """The whole recipe with all defaults as TOML; `load_recipe` reads it back as an equal recipe."""
    return tables_to_toml(tables_of(recipe))


def tables_of(recipe: Recipe) -> dict[str, Table]:
    """The keys and values, as JSON, of each section of a recipe, by the section's name.

    With several models there are "models.NAME" in place of "model".
    """
    tables = {name: getattr(recipe, name).model_dump(mode="json") for name in SECTIONS}
    if recipe.models:
        del tables["model"]
    return {f"models.{name}": own.model_dump(mode="json") for name, own in recipe.models.items()} | tables


def tables_to_toml(tables: Mapping[str, Table]) -> str:
    """Sections, given as JSON values by name, as the text of a TOML file; None becomes "none"."""
    lines: list[str] = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _with_run_folder(table: Table, source: Path) -> Table:
    run = table.get("run", {})
    if isinstance(run, dict) and "folder" not in run:
        return {**table, "run": {**run, "folder": f"runs/{source.stem}"}}
    return table


def _validate(table: Table) -> tuple[dict[str, Section], list[tuple[str, str]]]:
    """(the sections without faults, by name, (key, message) of every problem in the others)."""
    sections: dict[str, Section] = {}
    problems = []
    for name, section in SECTIONS.items():
        default = Recipe.model_fields[name]
        if name not in table and not default.is_required():
            sections[name] = default.get_default(call_default_factory=True, validated_data={})
            continue
        value = table.get(name, {})
        if not isinstance(value, dict):
            problems.append((name, f"{name}: expected a section, [{name}]; got {value!r}"))
            continue
        try:
            sections[name] = section.model_validate(value)
        except ValidationError as error:
            problems.extend(line for details in _true_errors(error) for line in _problems(section, name, details))
    return sections, problems


def _validate_models(models: Table) -> tuple[dict[str, MemberSection], list[tuple[str, str]]]:
    """(the sections of several models without faults, by name, (key, message) of every problem in the others)."""
    members: dict[str, MemberSection] = {}
    problems = []
    for name, value in models.items():
        try:
            members[name] = MemberSection.model_validate(value)
        except ValidationError as error:
            problems += [p for d in _true_errors(error) for p in _problems(MemberSection, f"models.{name}", d)]
            if isinstance(value, dict) and "path" not in value:
                near = get_close_matches(name, [other for other in models if other != name], n=1)
                problems += [(f"models.{name}", f"models.{name}: did you mean models.{one}?") for one in near]
    return members, problems


def _true_errors(error: ValidationError) -> Iterator[ErrorDetails]:
    """The errors of a pydantic error, without errors about lists that are too short because an item is wrong."""
    for details in error.errors():
        if details["type"] != "too_short" or len(details["input"]) < details["ctx"]["min_length"]:
            yield details


def _problems(section: type[Section], name: str, details: ErrorDetails) -> list[tuple[str, str]]:
    """(key, message) of each problem in one error that pydantic found in the section `name`.

    An error of our own checks may have several lines, each of which begins with a key.
    """
    path = (name, *details["loc"])
    key = _dotted(path)
    match details["type"]:
        case "value_error":
            # A problem of the whole section begins with ": ".
            lines = [f"{key}.{line}".replace(".: ", ": ") for line in str(details["ctx"]["error"]).splitlines()]
            return [(line.partition(":")[0], line) for line in lines]
        case "extra_forbidden":
            text = _unknown(path)
        case "missing":
            text = f"this key is required: {_meaning(section.model_fields[str(path[-1])].description or '')}"
        case "model_type" | "dict_type":
            text = f"write a table, {_table_of(section, key, details['loc'])}; got {_shown(details['input'])}"
        case "too_short":
            least = details["ctx"]["min_length"]
            text = f"give {least} or more values{_example(section, details['loc'])}; got {_shown(details['input'])}"
        case "too_long":
            most = details["ctx"]["max_length"]
            text = f"give {most} values at most{_example(section, details['loc'])}; got {_shown(details['input'])}"
        case "tuple_type":
            text = f"write a list{_example(section, details['loc'])}; got {_shown(details['input'])}"
        case _ if details["input"] == "none" and path[-1] in SWITCHED_OFF and issubclass(section, GroupSection):
            general = ".".join(ELSEWHERE[str(path[-1])])
            text = f'one model alone is not switched off; set {general} to "none", and this key for the others'
        case _:
            text = f"{_first_lower(details['msg'])}; got {_shown(details['input'])}"
    return [(key, f"{key}: {text}")]


def _example(section: type[Section], place: KeyPath) -> str:
    """An example of the list that a key of a section takes, after ", e.g. "; "" if there is none.

    It is the list in the key's docstring, else the key's default.
    """
    field = section.model_fields.get(str(place[0])) if len(place) == 1 else None
    if field is None:
        return ""
    stated = re.search(r"e\.g\. `(\[[^`]*\])`", " ".join((field.description or "").split()))
    if stated:
        return f", e.g. {stated[1]}"
    return f", e.g. {json.dumps(field.default)}" if isinstance(field.default, tuple) and field.default else ""


def _table_of(section: type[Section], key: str, place: KeyPath) -> str:
    """Words for the table to write at a place in a section, with an example of a key of it, and "none" if it may be.

    `key`: the dotted key of the place.
    """
    is_optional, inner, is_named = False, section, False
    for part in place:
        if is_named:  # the name of one of several tables
            is_named = False
            continue
        annotation = inner.model_fields[str(part)].annotation if str(part) in inner.model_fields else None
        kinds = get_args(annotation) or (annotation,)
        is_optional, is_named = type(None) in kinds, get_origin(annotation) is dict
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if not nested:
            return f"[{key}]"
        (inner,) = nested
    if is_named:
        return f"[{key}.NAME]"
    fields = inner.model_fields
    stated = next((name for name in fields if isinstance(fields[name].default, bool | int | float | str)), None)
    example = f"with {stated} = {_toml(fields[stated].default)}" if stated else f"with its {next(iter(fields))}"
    return f"e.g. [{key}] {example}" + (', or "none"' if is_optional else "")


def _shown(value: object) -> str:
    """The value as JSON; of a long one, such as a number of thousands of digits, the start and its length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:20]}... ({len(text)} characters)"


def _unknown(path: KeyPath) -> str:
    """The message about a section or key that does not exist; it names the nearest one that does."""
    *parents, last = map(str, path)
    keys = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
    moved = [key for key in keys if key.endswith(f".{last}")]  # keys of this name in other sections
    if not parents and (hint := answer((), last)):
        return hint
    if not parents:
        nearest = [f"[{name}]" for name in get_close_matches(last, SECTIONS, n=1)] or moved
        return "unknown section; " + (f"did you mean {nearest[0]}?" if nearest else f"sections: {', '.join(SECTIONS)}")
    of_component = "components" in parents[1:-1]
    here = (GroupSection if of_component else SECTIONS.get(parents[0], MemberSection)).model_fields
    if hint := answer(parents, last, here):
        return hint
    near = [".".join([*parents, key]) for key in get_close_matches(last, here, n=1)]
    if of_component:
        return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; a component has {', '.join(here)}"
    nearest = [*moved, *near, *get_close_matches(_dotted(path), keys, n=1, cutoff=0.75)]
    if not nearest and "arguments" in here:
        return f"unknown key; put arguments of the class into [{parents[0]}.arguments]"
    return "unknown key; " + (f"did you mean {nearest[0]}?" if nearest else f"[{parents[0]}] has {', '.join(here)}")


def _origin(key: str, overridden: frozenset[str]) -> str:
    """The note "set on the command line" if an override set the key, the section around it, or a part; else ""."""
    inner = key.partition("[")[0] + "."  # without the place of an item in a list
    is_overridden = any(inner.startswith(f"{other}.") or f"{other}.".startswith(inner) for other in overridden)
    return " (set on the command line)" if is_overridden else ""


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _meaning(docstring: str) -> str:
    """The first sentence of a key's docstring, without code marks, to be used within another sentence."""
    first, *_ = re.split(r"\.(?: (?=[A-Z])|$)", " ".join(docstring.replace("`", "").split()))
    return _first_lower(first)


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _toml(value: object) -> str:
    """A value of JSON as TOML; None is the word "none"."""
    match value:
        case None:
            return '"none"'
        case dict():
            return "{" + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(_toml(inner) for inner in value) + "]"
        case _:
            # JSON's numbers and strings are TOML's, except that TOML wants DEL escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

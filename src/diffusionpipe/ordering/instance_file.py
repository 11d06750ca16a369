"""Instances as JSON files: writing, and reading with every problem named at once, by line and field.

{
  "ranks": 2,
  "microbatches": 4,
  "placement": "any",
  "stages": [
    {"forward": 1, "input_grad": 1, "weight_grad": 1, "activation": 1, "kept_after_input_grad": 1},
    ... (2 x ranks half-stages in forward order)
  ],
  "comm": 0,
  "memory_limit": [3, 3],
  "objective": "makespan",
  "seconds": 10
}
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from diffusionpipe.errors import FileFormatError
from diffusionpipe.files.input_file import read_named
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.ir.codec import layout
from diffusionpipe.ordering.instance import HalfStage, Instance, Placing
from diffusionpipe.schedules.building.split_work import Goal

KeyPath: TypeAlias = tuple[str | int, ...]
LARGEST, SMALLEST = 1e100, 1e-100
"""The limits of all numbers but 0: sums of them are finite, and so is their ratio."""


def _sized(number: float) -> float:
    if number and number < SMALLEST:
        raise ValueError(f"below {SMALLEST:g}")
    return number


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=int(LARGEST))]
Decimal: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=LARGEST), AfterValidator(_sized)]
Amount: TypeAlias = Whole | Decimal

MAX_FORWARDS = 1_000_000
MAX_PROBLEMS = 12
_STRICT = ConfigDict(extra="forbid")


class _HalfStage(BaseModel):
    model_config = _STRICT
    forward: Amount
    input_grad: Amount
    weight_grad: Amount
    activation: Amount
    kept_after_input_grad: Amount


class _Instance(BaseModel):
    model_config = _STRICT
    ranks: Annotated[int, Field(strict=True, ge=1)]
    microbatches: Annotated[int, Field(strict=True, ge=1)]
    placement: Placing
    stages: list[_HalfStage]
    comm: Amount = 0
    memory_limit: list[Amount] | None = None
    objective: Goal = Goal.MAKESPAN
    seconds: Amount = 10


def read_instance(path: Path | str) -> Instance:
    """The instance in a JSON file.

    Raises:
        FileFormatError: it cannot be read, or is not an instance; the message lists the problems with their lines.
    """
    path = Path(path)
    try:
        text = read_named(path)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); give the path of an instance") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: is not UTF-8 text; write the instance as JSON") from error
    except ValueError as error:
        raise FileFormatError(f"{path}: {error}; give the path of an instance") from error
    return parse_instance(text, source=str(path))


def parse_instance(text: str, *, source: str = "instance") -> Instance:
    """The instance that a JSON text describes.

    Raises:
        FileFormatError: it is not an instance; the message lists every problem with its line.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise FileFormatError(f"{source}: line {line}: not valid JSON: {error}; correct this line") from error
    try:
        parsed = _Instance.model_validate(value)
    except ValidationError as error:
        problems = _described(error.errors())
    else:
        problems = list(_problems_between(parsed))
    if problems:
        lines = _lines(text)
        shown = [f"line {_line_of(lines, path)}: {what}" for path, what in problems[:MAX_PROBLEMS]]
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise FileFormatError("\n  ".join([f"{source}: not a valid instance", *shown, *more]))
    return Instance(
        ranks=parsed.ranks,
        microbatches=parsed.microbatches,
        placement=parsed.placement,
        stages=tuple(HalfStage(**stage.model_dump()) for stage in parsed.stages),
        comm=parsed.comm,
        memory_limit=None if parsed.memory_limit is None else tuple(parsed.memory_limit),
        objective=parsed.objective,
        seconds=parsed.seconds,
    )


def write_instance(instance: Instance, path: Path) -> None:
    """Write the instance to a JSON file that `read_instance` reads, a line for each half-stage.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
    """
    table = {
        "ranks": instance.ranks,
        "microbatches": instance.microbatches,
        "placement": str(instance.placement),
        "stages": [asdict(stage) for stage in instance.stages],
        "comm": instance.comm,
        "memory_limit": None if instance.memory_limit is None else list(instance.memory_limit),
        "objective": str(instance.objective),
        "seconds": instance.seconds,
    }
    write_atomically(path, layout(table) + "\n")


def _problems_between(parsed: _Instance) -> Iterator[tuple[KeyPath, str]]:
    """(path, text) of each fault between fields that are right by themselves, such as a wrong number of stages."""
    half_stages = 2 * parsed.ranks
    if len(parsed.stages) != half_stages:
        yield ("stages",), f"stages: {len(parsed.stages)} half-stages; {parsed.ranks} ranks need {half_stages}"
    for i, stage in enumerate(parsed.stages):
        if stage.kept_after_input_grad > stage.activation:
            kept, activation = stage.kept_after_input_grad, stage.activation
            yield (
                ("stages", i, "kept_after_input_grad"),
                f"stages[{i}].kept_after_input_grad: {kept} of an activation of {activation}; use at most {activation}",
            )
    limits = parsed.memory_limit
    if limits is not None and len(limits) != parsed.ranks:
        yield ("memory_limit",), f"memory_limit: {len(limits)} limits; give one for each of the {parsed.ranks} ranks"
    if half_stages * parsed.microbatches > MAX_FORWARDS:
        yield (
            ("microbatches",),
            f"microbatches: more than {MAX_FORWARDS:,} forwards with {half_stages} half-stages; use fewer",
        )


def _described(errors: list[ErrorDetails]) -> list[tuple[KeyPath, str]]:
    """(path of the field, text) of each fault that pydantic has found, once for each field.

    A number that is neither whole nor decimal is one fault.

    Problems beyond `MAX_PROBLEMS`, which are only counted, have no text.
    """
    problems: dict[KeyPath, str] = {}
    for error in errors:
        # A number is tried as whole and as decimal, and pydantic reports both under names of their own.
        path = tuple(part for part in error["loc"] if part not in _BRANCHES)
        if path not in problems:
            problems[path] = f"{_name(path)}{_reason(error, path)}" if len(problems) < MAX_PROBLEMS else ""
    return list(problems.items())


_BRANCHES = frozenset(
    {"constrained-int", "constrained-float", "int", "float", "function-after[_sized(), constrained-float]"}
)
"""The names that pydantic adds to the path of a number that may be whole or decimal."""


def _name(path: KeyPath) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return f"{text}: " if text else ""


def _reason(error: ErrorDetails, path: KeyPath) -> str:
    given = error["input"]
    match error["type"]:
        case "missing":
            return "is missing; add it"
        case "extra_forbidden":
            fields = _HalfStage.model_fields if path[0] == "stages" else _Instance.model_fields
            close = get_close_matches(str(path[-1]), fields, n=1)
            return f"is not a field; {f'did you mean {close[0]}?' if close else 'known are ' + ', '.join(fields)}"
        case "enum":
            return f"is {given!r}; use {error['ctx']['expected']}"
        case "list_type":
            return f"is {given!r}; give a list"
        case "model_type" | "model_attributes_type":
            return f"is {given!r}; give an object with the fields {', '.join(_fields_at(path))}"
        case _:
            whole = path in (("ranks",), ("microbatches",))
            wanted = "a whole number of at least 1" if whole else "a number from 1e-100 to 1e100, or 0"
            return f"is {given!r}; use {wanted}"


def _fields_at(path: KeyPath) -> list[str]:
    return list(_HalfStage.model_fields if path else _Instance.model_fields)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]|[^\s\[\]{}:,"]+')


def _lines(text: str) -> dict[KeyPath, int]:
    """Path of every value of a sound JSON text -> its line, counted from 1."""
    # The text is sound JSON, so tokens tell where values are: no second parser is needed.
    found: dict[KeyPath, int] = {}
    path: list[str | int] = []
    kinds: list[str] = []
    line, end, key = 1, 0, ""
    for token in _TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        end = token.start()
        word = token.group()
        if word == ":":
            path[-1] = str(json.loads(key))
        elif word == ",":
            last = path[-1]  # the next place of a list, or the next key of an object
            path[-1] = last + 1 if isinstance(last, int) else ""
        elif word in "]}":
            path.pop()
            kinds.pop()
        else:
            is_key = bool(kinds) and kinds[-1] == "{" and path[-1] == ""  # "" as the last part: a key comes next
            key = word
            if not is_key:
                found.setdefault(tuple(path), line)
            if word in "[{":
                kinds.append(word)
                path.append(0 if word == "[" else "")
    return found


def _line_of(lines: dict[KeyPath, int], path: KeyPath) -> int:
    """The line of the value at `path`, or of the nearest value around it that is in `lines`; 1 if none is."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)

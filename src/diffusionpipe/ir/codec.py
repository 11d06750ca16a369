"""Frozen dataclasses as JSON values, and back: the base of every file format of ours.

The dataclass is the format: its fields are the keys, in order. Values that have a text form are strings:

    Action "2F0"    an order of actions "0F0 1F0 0B0"    Range "0:4"    Share "0:1/2"    StrEnum "F"

A key that is absent takes the field's default; without a default it is a problem. An unknown key always is one.
To store a new dataclass, nothing is to be done here unless one of its fields has a type that `decode` does not know.
"""

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cache

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir.action import Action, parse_action
from diffusionpipe.ir.placement import Range, Share

LINE_WIDTH = 120
_MAX_WHOLE = 2**62 - 1
_MAX_NUMBER = 1e100
"""The largest decimal number that is read; sums and products of a few such numbers are finite."""


def _parse_range(text: str) -> Range:
    start, _, stop = text.partition(":")
    return Range(int(start), int(stop))


def _parse_share(text: str) -> Share:
    start, _, stop = text.partition(":")
    return Share(Fraction(start), Fraction(stop))


_PARSERS: dict[type, tuple[Callable[[str], object], str]] = {
    Action: (parse_action, "2F0"),
    Range: (_parse_range, "0:4"),
    Share: (_parse_share, "0:1/2"),
}


@cache  # a profile holds thousands of values of few classes
def _hints(kind: type) -> dict[str, object]:
    """Name of each field of a dataclass -> its type."""
    return typing.get_type_hints(kind)


class _Bad:
    """The value that `decode` returns after it has noted a problem."""


_BAD = _Bad()


def encode(value: object, kind: object) -> object:
    """The JSON value (dict, list, str, number, bool or None) of `value`; `kind` is its type, one of `decode`'s."""
    arguments = typing.get_args(kind)
    if kind == tuple[Action, ...] and isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, tuple):
        return [encode(item, arguments[0]) for item in value]
    if isinstance(value, frozenset):  # sets have no order, and equal values must have equal text
        return sorted(str(item) for item in value)
    if type(value) in _PARSERS or isinstance(value, StrEnum):
        return str(value)
    if is_dataclass(value):
        hints = _hints(type(value))  # type: ignore[arg-type]
        # Fields without `init` follow from the others.
        return {
            field.name: encode(getattr(value, field.name), hints[field.name]) for field in fields(value) if field.init
        }
    assert value is None or isinstance(value, bool | int | float | str), f"no JSON form for {type(value).__name__}"
    return value


def decode(kind: object, data: object, where: str, problems: list[str]) -> object:
    """The value of type `kind` that the JSON value `data` stands for.

    `kind` is a dataclass, int, float, str, bool, a StrEnum, Action, Range, Share, or one of these in `tuple[X, ...]`,
    `frozenset[X]` or `X | None`. Faults are added to `problems`, each with the path of the field (`where`); the result
    then means nothing.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind == tuple[Action, ...]:
        return _decode_order(data, where, problems)
    if origin in (tuple, frozenset):
        return _decode_list(origin, arguments[0], data, where, problems)
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        return None if data is None else decode(inner, data, where, problems)
    assert isinstance(kind, type), f"decode does not know {kind!r}"
    if kind in _PARSERS or issubclass(kind, StrEnum):
        return _decode_text(kind, data, where, problems)
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where, problems)
    return _decode_plain(kind, data, where, problems)


def _refuse(where: str, wanted: str, data: object, problems: list[str]) -> _Bad:
    shown = json.dumps(data) if not isinstance(data, int) or abs(data) <= _MAX_WHOLE else "a larger number"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problems.append(f"{where or 'the file'}: must be {wanted}; got {shown}")
    return _BAD


def _decode_plain(kind: type, data: object, where: str, problems: list[str]) -> object:
    match kind:
        case builtins if builtins is bool:
            return data if isinstance(data, bool) else _refuse(where, "true or false", data, problems)
        case builtins if builtins is int:
            if not isinstance(data, int) or isinstance(data, bool):  # bool is a subclass of int
                return _refuse(where, "a whole number", data, problems)
            return data if abs(data) <= _MAX_WHOLE else _refuse(where, "a whole number below 2^62", data, problems)
        case builtins if builtins is float:
            is_number = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= _MAX_NUMBER
            return data if is_number else _refuse(where, "a finite number, at most 1e100", data, problems)
        case _:
            assert kind is str, f"decode does not know {kind!r}"
            return data if isinstance(data, str) else _refuse(where, "a text", data, problems)


def _decode_text(kind: type, data: object, where: str, problems: list[str]) -> object:
    if issubclass(kind, StrEnum):
        known = [str(member.value) for member in kind]
        return kind(data) if data in known else _refuse(where, f"one of {', '.join(known)}", data, problems)
    parse, example = _PARSERS[kind]
    if not isinstance(data, str):
        return _refuse(where, f"a text like {json.dumps(example)}", data, problems)
    try:
        return parse(data)
    except (ValueError, ZeroDivisionError, ScheduleError) as error:
        return _refuse(where, f"a text like {json.dumps(example)} ({error})", data, problems)


def _decode_order(data: object, where: str, problems: list[str]) -> object:
    if not isinstance(data, str):
        return _refuse(where, 'one text of actions like "0F0 1F0 0B0"', data, problems)
    return tuple(_decode_text(Action, word, f"{where}, action {i}", problems) for i, word in enumerate(data.split()))


def _decode_list(origin: object, item: object, data: object, where: str, problems: list[str]) -> object:
    if not isinstance(data, list):
        return _refuse(where, "a list", data, problems)
    values = [decode(item, value, f"{where}[{i}]", problems) for i, value in enumerate(data)]
    # A list with a bad value has its problem already; a frozenset of it could not be compared for repetitions.
    if origin is tuple or _BAD in values:
        return tuple(values)
    if len(set(values)) != len(values):
        return _refuse(where, "a list without repetitions", data, problems)
    return frozenset(values)


def _decode_dataclass(kind: type, data: object, where: str, problems: list[str]) -> object:
    assert is_dataclass(kind)
    known = {field.name: field for field in fields(kind) if field.init}
    if not isinstance(data, dict):
        return _refuse(where, f"an object with {', '.join(known)}", data, problems)
    prefix = f"{where}." if where else ""
    num_problems = len(problems)
    unknown = sorted(data.keys() - known.keys())
    problems.extend(f"{prefix}{key}: unknown key; known are {', '.join(known)}" for key in unknown)
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{prefix}{name}: is missing")
    hints = _hints(kind)
    values = {name: decode(hints[name], data[name], prefix + name, problems) for name in known if name in data}
    if len(problems) > num_problems:
        return _BAD
    try:
        return kind(**values)
    except (ValueError, ScheduleError) as error:
        problems.append(f"{where or 'the file'}: {error}")
        return _BAD


def layout(value: object, indent: int = 0) -> str:
    """The JSON text of a value, in which each part that fits on a line of 120 columns is written on one line.

    `indent` is the number of columns before the text. NaN and infinite numbers raise a ValueError.
    """
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if indent + len(flat) <= LINE_WIDTH or not isinstance(value, dict | list):
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        lines = [f"{json.dumps(key, ensure_ascii=False)}: {layout(item, indent + 2)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + layout(item, indent + 2) for item in value) + "\n" + " " * indent + "]"

"""The text form of rules: one "key: value" a line, comments after #.

    stages: chain | loop N | wave N      N stages on each rank
    traversal: all at once               or rounds of SIZE, units of SIZE: of at least that many micro-batches
    limit: SIZE                          or none
    priority: F B                        or F I W, in any order
    meanwhile: F                         any of them, or none

A SIZE is arithmetic with `ranks`, `chunks`, `microbatches`, in `limit` also with `rank` and `round`.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from diffusionpipe.errors import ConfigError, FileFormatError
from diffusionpipe.ir import Op
from diffusionpipe.schedules.building.shapes import SPLIT, TRAIN
from diffusionpipe.schedules.files.expression import value_of
from diffusionpipe.schedules.files.rules import NAMES, SIZES, Rules, Shape

MAX_CHUNKS = 1000
_DEFAULTS = {"traversal": "all at once", "limit": "none", "meanwhile": "none"}
_KEYS = ("stages", "traversal", "limit", "priority", "meanwhile")


def rules_from_text(text: str, *, source: str) -> Rules:
    r"""The rules that a text states, one "key: value" on a line; `source` names the text in errors.

    >>> rules_from_text("stages: loop 2   # as interleaved 1F1B\npriority: F B", source="rules").chunks
    2

    Raises:
        FileFormatError: a rule is missing, unknown, doubled or wrong; every problem is named with its line.
    """
    problems: list[str] = []
    lines = _lines(text, problems)
    problems += [f"`{key}` is missing; {_WANTED[key]}" for key in _KEYS if key not in lines and key not in _DEFAULTS]
    found: dict[str, object] = {}
    for key in _KEYS:
        number, value = lines.get(key, (0, _DEFAULTS.get(key, "")))
        if not value:
            continue
        try:
            found |= _READERS[key](value)
        except ConfigError as error:
            problems.append(f"line {number}: {key}: {error}")
    ops, meanwhile = found.get("priority"), found.get("meanwhile")
    if isinstance(ops, tuple) and isinstance(meanwhile, tuple) and not set(meanwhile) <= set(ops):
        problems.append(f"line {lines['meanwhile'][0]}: meanwhile: use only ops of priority: {' '.join(ops)}")
    if problems:
        raise FileFormatError("\n  ".join([f"{source}: these rules cannot be read", *problems]))
    return Rules(**found)  # type: ignore[arg-type]  # the readers give the fields of Rules


def _lines(text: str, problems: list[str]) -> dict[str, tuple[int, str]]:
    """Key -> (line number, value) of each rule in the text of a rules file; faults are added to `problems`."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        key, colon, value = (part.strip() for part in words.partition(":"))
        if not colon or not value:
            problems.append(f"line {number}: {words[:40]!r} is not a rule; write e.g. priority: F B")
        elif key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_KEYS)}"
            problems.append(f"line {number}: there is no rule {key[:40]!r}; {hint}")
        elif key in found:
            problems.append(f"line {number}: {key} is already on line {found[key][0]}; remove one of the two")
        else:
            found[key] = number, value
    return found


def _stages(value: str) -> Mapping[str, object]:
    match value.split():
        case ["chain"]:
            return {"shape": Shape.CHAIN}
        # Int() refuses texts of thousands of digits.
        case [("loop" | "wave") as shape, count] if count.isdecimal() and 1 <= int(count[:9]) <= MAX_CHUNKS:
            return {"shape": Shape(shape), "chunks": int(count)}
        case _:
            raise ConfigError(f"{value[:40]!r} is unknown; {_WANTED['stages']}")


def _traversal(value: str) -> Mapping[str, object]:
    kind, _, size = value.partition(" of ")
    if value == _DEFAULTS["traversal"]:
        return {}
    if kind not in ("rounds", "units"):
        raise ConfigError(f"{value[:40]!r} is unknown; {_WANTED['traversal']}")
    return {"group": _size(size, SIZES), "is_unit": kind == "units"}


def _limit(value: str) -> Mapping[str, object]:
    return {} if value == "none" else {"limit": _size(value, NAMES)}


def _size(text: str, names: tuple[str, ...]) -> str:
    value_of(text, {name: 1009 + number for number, name in enumerate(names)})  # so only names and form are checked
    return text


def _priority(value: str) -> Mapping[str, object]:
    ops = _ops(value)
    if frozenset(ops) not in (TRAIN, SPLIT):
        raise ConfigError(f"{value[:40]!r} are not the ops of a schedule; {_WANTED['priority']}")
    return {"priority": ops}


def _meanwhile(value: str) -> Mapping[str, object]:
    return {"meanwhile": () if value == "none" else _ops(value)}


def _ops(value: str) -> tuple[Op, ...]:
    words = value.split()
    if len(set(words)) < len(words) or not set(words) <= SPLIT | TRAIN:
        raise ConfigError(f"{value[:40]!r} are not different ops of F, B, I and W; write e.g. F B")
    return tuple(map(Op, words))


_READERS = {
    "stages": _stages,
    "traversal": _traversal,
    "limit": _limit,
    "priority": _priority,
    "meanwhile": _meanwhile,
}
_WANTED = {
    "stages": f"write chain, loop N or wave N, with N stages on each rank (1 to {MAX_CHUNKS})",
    "traversal": "write all at once, rounds of SIZE or units of SIZE, e.g. rounds of ranks",
    "priority": "write F and B, or F, I and W, the first choice first",
}

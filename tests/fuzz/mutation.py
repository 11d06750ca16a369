"""Small changes of files: of their bytes, of a JSON value somewhere inside, of words of a text."""

import json
import pickle
import re
from copy import deepcopy
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 1000, 100_000, 10**9, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e-320, 1e15, 1e308,
    -1e308, float("inf"), float("nan"), "", " ", "x", "\0", "\ufeff", "\ud800", "0", "-1", "1e999", "../../etc/passwd",
    "/dev/null", "a=b", "[bold]", "%s{0}", "x" * 5000, [], {}, [[]], [None], [0], ["x"], {"x": 1}, [1] * 1000,
)  # fmt: skip
"""Values that programs stumble over."""
WORDS = (
    "", "0", "-1", "1", "3", "1000000", "9" * 400, "9" * 5000, "1e308", "-1e308", "nan", "inf", "true", "none", '"x"',
    '""', "[]", "{}", "[[]]", "[" * 3000, "x=y", "\0", "\ufeff", "../..", "/dev/zero", "2F0", "0B0", "999999999F0", ",",
    "\n", "=", ".", '"auto"', '"\\u0000"', "1:0", "0:1/0", "-0.0", "1e15", "1e-300", "0x7fffffffffffffff", "1970-01-01",
    "\U0001f600", "\u202e", "{ a = 1 }", "100000", "1e-320",
)  # fmt: skip
"""The same for texts."""
_DEPTH, _WIDTH = 2000, 50_000


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """One to three changes anywhere."""
    content = bytearray(data)
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(content) + 1)
        size = min(random.choice((1, 1, 2, 8, 64)), len(content) - place)
        match random.randrange(6):
            case 0 if size:
                content[place] ^= 1 << random.randrange(8)
            case 1:
                del content[place : place + size]
            case 2:
                content[place:place] = random.randbytes(random.choice((1, 4, 16)))
            case 3:
                del content[place:]
            case 4:
                content[place:place] = content[place : place + size]
            case _:
                content[place : place + size] = bytes([random.choice((0, 255, 127, 34, 123))]) * size
    return bytes(content)


def mutated_text(text: str, random: Random) -> str:
    """Words or lines replaced, doubled, exchanged or left out; now and then bytes instead."""
    if random.random() < 0.15:
        return mutated_bytes(text.encode(), random).decode("utf-8", "replace")
    for _ in range(random.randint(1, 2)):
        lines = text.split("\n")
        at = random.randrange(len(lines))
        match random.randrange(5):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[random.randrange(len(lines))] if lines else "")
            case _:
                parts = _tokens(lines[at])
                which = random.randrange(len(parts))
                parts[which] = random.choice(WORDS)
                lines[at] = "".join(parts)
        text = "\n".join(lines)
    return text


def changed_table(data: bytes, random: Random) -> bytes:
    """A pickled table of a checkpoint with another value in one of its fields."""
    table = pickle.loads(data)
    items, places = list(table.state_dict_metadata.values()), list(table.storage_data.values())
    holder = random.choice((table, *items, *places, *(item.properties for item in items)))
    chunks = [chunk for item in items for chunk in item.chunks]
    holder = random.choice((holder, holder, *chunks))
    fields = [name for name in vars(holder) if name != "memory_format"]  # torch pickles no other value of it
    object.__setattr__(holder, random.choice(fields), _nasty(random))
    return pickle.dumps(table)


def encoded(text: str, random: Random) -> bytes:
    """The text as bytes: UTF-8, now and then with a mark or a NUL, cut off, or in another encoding."""
    data = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.95:
        return data
    match random.randrange(6):
        case 0:
            return b"\xef\xbb\xbf" + data
        case 1:
            return text.encode("utf-16", "surrogatepass")
        case 2:
            return data[: random.randrange(len(data) + 1)]
        case 3:
            return data.replace(b"\n", b"\r\n") + b"\x1a"
        case 4:
            place = random.randrange(len(data) + 1)
            return data[:place] + b"\0" * 1000 + data[place:]
        case _:
            return b"\xe4\xf6\xfc " + data


def _tokens(line: str) -> list[str]:
    """Words and what is between them."""
    parts: list[str] = []
    for letter in line:
        if parts and letter.isalnum() == parts[-1][-1].isalnum():
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts or [""]


def mutated_json(text: str, random: Random) -> str:
    """One or two values replaced, removed, added or exchanged; now and then the text itself is changed."""
    if random.random() < 0.15:
        return mutated_text(text, random)
    value = json.loads(text)
    for _ in range(random.randint(1, 2)):
        value = _changed(value, random)
    result = json.dumps(value, indent=random.choice((None, 1)))
    match random.randrange(100):
        case 0:
            return '{"a":' * _DEPTH + result + "}" * _DEPTH
        case 1 if result.startswith("{"):
            return result[:-1] + "".join(f',"k{number}":0' for number in range(_WIDTH)) + "}"
        case 2 if result.startswith("{"):
            return '{"x":1,"x":1,' + result[1:]
        case 3:
            return re.sub(r"\d+", "9" * 5000, result, count=1)
        case _:
            return result


def _changed(value: Any, random: Random) -> Any:
    """The value with one place in it changed."""
    places = list(_places(value))
    if not places:
        return _nasty(random)
    holder, key = random.choice(places)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice(("x", "", "name", *holder))] = _nasty(random)
        case 1:
            holder.insert(key, holder[key])
        case 2:
            other, there = random.choice(places)
            holder[key], other[there] = other[there], holder[key]
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = random.choice((holder[key] + 1, -holder[key], holder[key] * 1000, holder[key] // 2))
        case 4 if isinstance(holder[key], str):
            holder[key] = mutated_text(holder[key], random)
        case _:
            holder[key] = _nasty(random)
    if _is_circular(value):
        return _nasty(random)
    return value


def _nasty(random: Random) -> Any:
    """One of the values, as a copy: a case must not depend on what another has put into a list."""
    return deepcopy(random.choice(NASTY))


def _places(value: Any, depth: int = 0) -> Any:
    """(holder, key) of everything inside; the outer ones again and again, because there are few."""
    if depth > 40:
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield from [(value, key)] * (3 if depth < 2 else 1)
        yield from _places(inner, depth + 1)


def _is_circular(value: Any) -> bool:
    """Whether an exchange has put a value into itself."""
    try:
        json.dumps(value)
    except ValueError:
        return True
    return False

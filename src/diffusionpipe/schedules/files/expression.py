"""Whole numbers written as arithmetic with names, such as "2 * (ranks - rank) - 1"."""

import ast
import operator
from collections.abc import Callable, Mapping

from diffusionpipe.errors import ConfigError

LONGEST = 200
"""The most characters of an expression."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def value_of(text: str, values: Mapping[str, int]) -> int:
    """The number that the expression `text` gives with these values of its names.

    An expression may have whole numbers, names, + - * // and parentheses, min and max.

    >>> value_of("2 * (ranks - rank) - 1", {"ranks": 4, "rank": 1})
    5

    Raises:
        ConfigError: it has something else, an unknown name, or divides by zero.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"it has {len(text)} characters; use at most {LONGEST}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, values)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The parser raises the last two for a text that is nested too deeply.
        raise ConfigError(f"{text!r} is not arithmetic; write e.g. 2 * (ranks - rank) - 1") from None
    except ZeroDivisionError:
        raise ConfigError(f"{text!r} divides by zero") from None


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):  # True is an int too
            return number
        case ast.Name(id=name):
            if name not in values:
                raise ConfigError(f"there is no number {name!r}; known are {', '.join(values)}")
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id=("min" | "max") as name), args=[_, *_] as arguments, keywords=[]):
            return _FUNCTIONS[name]([_value(argument, values) for argument in arguments])
        case _:
            raise ConfigError(
                f"{ast.unparse(node)!r} is not allowed; use whole numbers, names, + - * // ( ), min and max"
            )

"""The base of every section of a recipe: strict, frozen, unknown keys refused; and the types of its keys."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer

from diffusionpipe.ir.home import expanded

T = TypeVar("T")
_MAX_NAME, _MAX_PATH = 255, 4095


def _none_for_word(value: object) -> object:
    return None if value == "none" else value


def _none_for_auto(value: object) -> object:
    return None if value == "auto" else value


def _auto_for_none(value: object) -> object:
    return "auto" if value is None else value


def patterns_for_bool(value: object) -> object:
    """("*",), all layers, for true and () for false; any other value as it is."""
    return (("*",) if value else ()) if isinstance(value, bool) else value


def texts_for_text(value: object) -> object:
    """A tuple of the one text, for a key that takes a text or a list of texts; any other value as it is."""
    return (value,) if isinstance(value, str) else value


def finite_arguments(arguments: object) -> object:
    """The same keyword arguments; pydantic calls it to check them.

    Raises:
        ValueError: a number in them is infinite, NaN or larger than a float can hold.
    """
    if isinstance(arguments, dict):
        raise_problems(
            f"{name}: expected finite numbers of at most {sys.float_info.max:.1g}; change it"
            for name, value in arguments.items()
            if not _is_finite(value)
        )
    return arguments


def _is_finite(value: object) -> bool:
    """Whether all numbers in a value of JSON are finite."""
    match value:
        case int() | float():
            return abs(value) <= sys.float_info.max  # False for nan too
        case dict():
            return all(map(_is_finite, value.values()))
        case list():
            return all(map(_is_finite, value))
        case _:
            return True


def of_user(path: str) -> str:
    """The path with the home folder in place of a "~" at its start.

    Raises:
        ValueError: there is no such user.
    """
    try:
        return expanded(path)
    except ValueError as error:
        raise ValueError(f": {error}") from None


def _place_of_user(path: Path) -> Path:
    return Path(of_user(str(path)))


def checked_path(path: Path) -> Path:
    """The same path; pydantic calls it to check whether a file of that name can exist.

    Raises:
        ValueError: no file of that name can exist: it has a NUL, is too long, or has letters that the locale lacks.
    """
    if "\0" in str(path):
        raise ValueError(": a path cannot hold a NUL character")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(": the bytes of a path must be UTF-8, because it is written into files of text") from None
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        why = f"this locale has no letters for the path (its encoding is {sys.getfilesystemencoding()})"
        raise ValueError(f": {why}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1") from None
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > _MAX_NAME or len(os.fsencode(path)) > _MAX_PATH:
        raise ValueError(f": a path has at most {_MAX_PATH} bytes and {_MAX_NAME} between two slashes")
    return path


# The sections are strict (no "3" for 3); where TOML has no such type, a list, a word or a string must do.
Several = Annotated[tuple[T, ...], Field(strict=False)]
Choice = Annotated[T, Field(strict=False)]
Place = Annotated[Path, Field(strict=False), AfterValidator(_place_of_user), AfterValidator(checked_path)]
Named = Annotated[str, Field(min_length=1), AfterValidator(of_user)]
"""The path of a file, or a word that the key accepts in place of it, such as "auto"."""
Maybe = Annotated[T | None, BeforeValidator(_none_for_word)]
# None is written "auto": what the model itself says.
Auto = Annotated[T | None, BeforeValidator(_none_for_auto), PlainSerializer(_auto_for_none)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Arguments = Annotated[dict[str, JsonValue], BeforeValidator(finite_arguments)]
Decay = Annotated[float, Field(gt=0, lt=1)]
FOR_ALL = ("fused", "foreach", "capturable", "differentiable")
"""Arguments of an optimizer that say how an update is computed, which torch does for all parameters alike."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raises all problems as one ValueError for pydantic, a line "key: problem" for each; without any it does nothing.

    Raises:
        ValueError: there are problems.
    """
    if lines := "\n".join(problems):
        raise ValueError(lines)


class Section(BaseModel):
    """The base of a section of the recipe: strict, frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

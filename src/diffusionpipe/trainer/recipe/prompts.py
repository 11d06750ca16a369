"""Files of prompts, for `sampling.prompts = "prompts.txt"` and `diffusionpipe sample --prompts`.

# a line that begins with # is a comment
a blue tit on a branch
{"prompt": "an owl at night", "negative_prompt": "blurry"}
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from diffusionpipe.errors import RecipeError
from diffusionpipe.files.input_file import read_named

MAX_PROMPTS = 16 * 2**20
"""The most bytes of a file of prompts."""

_KEYS = ("prompt", "negative_prompt")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt in a file, with its negative prompt."""

    text: str
    negative: str | None
    """The text of content that the picture should not show; None if the line has none."""


def read_prompts(path: Path) -> tuple[PromptLine, ...]:
    """The prompts of a file in UTF-8, one a line: a text, or a JSON object where it begins with a brace.

    Raises:
        RecipeError: the file cannot be read, holds no prompt, or lines are wrong; the message names each of them.
    """
    try:
        lines = read_named(path, MAX_PROMPTS).splitlines()
    except OSError as error:
        raise RecipeError(
            f"there is no file of prompts {path} ({error.strerror}); give a text file with one prompt a line"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text file in UTF-8; write one prompt a line") from error
    except ValueError as error:
        raise RecipeError(f"{path}: {error}; write one prompt a line") from error
    prompts, problems = [], []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            prompts.append(_prompt_of(line))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise RecipeError("\n".join(problems))
    if not prompts:
        raise RecipeError(f"{path} has no prompts; write one prompt a line")
    return tuple(prompts)


def _prompt_of(line: str) -> PromptLine:
    """The prompt of a line. Raises ValueError with the reason where it cannot be understood."""
    if not line.startswith("{"):
        return PromptLine(line, None)
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}); a line in braces must be JSON") from error
    for key in values:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1, cutoff=0.5)
            raise ValueError(f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else "use " + _named()))
    if "prompt" not in values:
        raise ValueError('"prompt" is missing')
    for key, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{key!r} must be a text; got {json.dumps(value)}")
    return PromptLine(values["prompt"], values.get("negative_prompt"))


def _named() -> str:
    return " and ".join(repr(key) for key in _KEYS)


def negatives_of(prompts: tuple[PromptLine, ...], fallback: str | None = None) -> tuple[str, ...]:
    """A negative prompt for each prompt; `fallback`, or else "", for a prompt without one.

    () if no prompt has one and there is no fallback. () and empty texts differ: without a negative prompt some models
    are not guided, and others read zeros.

    >>> negatives_of((PromptLine("an owl", None), PromptLine("a wren", "blurry")))
    ('', 'blurry')
    >>> negatives_of((PromptLine("an owl", None),))
    ()
    """
    if fallback is None and all(prompt.negative is None for prompt in prompts):
        return ()
    return tuple((fallback or "") if prompt.negative is None else prompt.negative for prompt in prompts)

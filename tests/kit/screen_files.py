"""Screens as users see them, kept as text files that a reviewer can read: tests/screens/NAME.txt.

`WRITE_SCREENS=1 python -m pytest ...` writes them anew. Look at every one that changes before you commit it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "screens"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """The text without a terminal's escape sequences, and of lines drawn over each other only the last state."""
    lines = [line.split("\r")[-1].rstrip() for line in _ESCAPES.sub("", text.replace("\r\n", "\n")).split("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def masked(text: str, patterns: Mapping[str, str]) -> str:
    """The text with everything that differs between runs replaced, e.g. {r"step_s=[0-9.]+": "step_s=#"}."""
    for pattern, replacement in patterns.items():
        text = re.sub(pattern, replacement, text)
    return text


def assert_screen(name: str, text: str) -> None:
    """Compares with tests/screens/NAME.txt, escape sequences and spaces at line ends apart."""
    file, shown = FOLDER / f"{name}.txt", plain(text)
    if os.environ.get("WRITE_SCREENS"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(shown, encoding="utf-8")
    assert file.is_file(), f"{file.name} is not kept yet; run with WRITE_SCREENS=1 and look at it"
    assert shown == file.read_text(encoding="utf-8")

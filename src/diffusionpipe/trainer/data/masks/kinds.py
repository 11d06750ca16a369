"""The kinds of masks that a recipe may name."""

from enum import StrEnum

NAME = "{name}"
"""The part of a pattern that stands for a picture's name without its ending."""


class MaskKind(StrEnum):
    """Where the hole of a sample comes from."""

    EDGES = "edges"
    BOXES = "boxes"
    FILE = "file"
    FIRST = "first"

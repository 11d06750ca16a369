"""The kinds of masks that a recipe may name."""

from enum import StrEnum

NAME = "{name}"
"""The part of a pattern that stands for a picture's name without its ending."""


class MaskKind(StrEnum):
    """The way in which the hole of a sample is made.

    Drawn at edges or as a box, read from a file, or all but frame 1.
    """

    EDGES = "edges"
    BOXES = "boxes"
    FILE = "file"
    FIRST = "first"

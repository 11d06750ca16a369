"""The kinds of masks that a recipe may name."""

from enum import StrEnum

NAME = "{name}"
"""The part of a pattern of paths in place of which a picture's name without its ending is put."""


class MaskKind(StrEnum):
    """The way in which the hole of a sample is made.

    It is drawn at edges or as a box, read from a file, or consists of all frames of a clip but the first.
    """

    EDGES = "edges"
    BOXES = "boxes"
    FILE = "file"
    FIRST = "first"

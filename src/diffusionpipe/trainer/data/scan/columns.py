"""The columns of a table of samples."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of a table's columns for pictures, captions and labels, and of the split that is read."""

    image: str = "image"
    """The column of pictures."""
    text: str = "text"
    """The column of captions."""
    label: str = "label"
    """The column of labels."""
    split: str = "train"
    """The name of the split."""


USUAL_COLUMNS = Columns()

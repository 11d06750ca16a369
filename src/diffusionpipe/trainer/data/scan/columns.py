"""The columns of a table of samples."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of a table's columns for pictures, captions and labels, and of the split that is read."""

    image: str = "image"
    text: str = "text"
    label: str = "label"
    split: str = "train"


USUAL_COLUMNS = Columns()

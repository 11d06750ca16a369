"""The kinds of places that hold samples, by their paths alone: folders, shards and tables.

data/birds                       a folder of pictures
data/birds-{000..012}.tar        shards as WebDataset writes them
data/birds/*.parquet             a table: .parquet, .csv, .json, .jsonl, .arrow
data/saved                       a data set that Hugging Face's `save_to_disk` has written
"""

import glob
import re
from enum import StrEnum
from pathlib import Path

_TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_SHARDS = 100_000


class PlaceKind(StrEnum):
    """The kind of a place that holds samples: a folder, shards, or a table."""

    FOLDER = "folder"
    SHARDS = "shards"
    TABLE = "table"


def kind_of_place(path: Path) -> PlaceKind:
    """The kind of a place that holds samples: a table or shards by its ending or content, else a folder."""
    if is_saved(path) or (path.suffix.lower() in _TABLES and not path.is_dir()):
        return PlaceKind.TABLE
    if path.name.lower().endswith((".tar", ".tar.gz", ".tgz")) and not path.is_dir():
        return PlaceKind.SHARDS
    return PlaceKind.FOLDER


def is_saved(path: Path) -> bool:
    """Whether the folder holds a data set that Hugging Face's `save_to_disk` has written."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def table_kind(path: Path) -> str:
    """The name of a table's format in Hugging Face's library, e.g. "json" for .jsonl, by the ending of the path.

    Raises:
        KeyError: it is not a table's ending.
    """
    return _TABLES[path.suffix.lower()]


def files_of(path: Path) -> tuple[Path, ...]:
    """The paths of the files that `path` names, sorted; files that it spells out need not exist.

    In it "*" matches any characters, and "{000..012}" each of these numbers.
    """
    if is_saved(path):
        return (path,)
    found: list[Path] = []
    for name in _spelled(str(path)):
        found += [Path(one) for one in glob.glob(name)] if glob.has_magic(name) else [Path(name)]
    return tuple(sorted(found))


def problem_of_place(path: Path) -> str | None:
    """A sentence that names the missing folder or file of a place; None if none is missing."""
    if kind_of_place(path) is PlaceKind.FOLDER:
        return None if path.is_dir() else f"there is no folder {path}"
    files = files_of(path)
    if not files:
        return f"no file is named {path}"
    missing = [file for file in files if not file.exists()]
    return f"there is no file {missing[0]}" if missing else None


def _spelled(text: str) -> list[str]:
    """All names that `text` spells, with each number of a range such as "{000..012}" in turn."""
    found = _BRACES.search(text)
    if found is None:
        return [text]
    first, last, width = int(found[1]), int(found[2]), len(found[1])
    numbers = range(first, min(last, first + _MOST_SHARDS) + 1)  # a slip in a number must not fill the memory
    return [
        name
        for number in numbers
        for name in _spelled(f"{text[: found.start()]}{number:0{width}d}{text[found.end() :]}")
    ]

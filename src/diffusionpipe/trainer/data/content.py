"""The places of a sample's bytes: a file of its own, a part of a tar file, or a row of a table.

The same readers read all three kinds. They get a path or one of these objects.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.data.places import is_saved, table_kind


@dataclass(frozen=True, slots=True)
class TarMember:
    """The place of a picture's bytes in a tar file that is not compressed."""

    file: Path
    """The path of the tar file."""
    start: int
    """The position of the picture's first byte in it."""
    size: int
    """The number of the picture's bytes."""
    name: str
    """The name of the picture in the tar file."""

    def __str__(self) -> str:
        return f"{self.file}/{self.name}"


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The files of a table of samples, the split that is read, and the column of pictures."""

    files: tuple[str, ...]
    """The paths of the table's files."""
    split: str
    """The name of the split that is read, e.g. "train"."""
    image: str
    """The name of the column of pictures."""


@dataclass(frozen=True, slots=True)
class TableCell:
    """The place of a picture in a table: the table, and the number of its row."""

    table: SampleTable
    row: int

    def __str__(self) -> str:
        return f"{self.table.files[0]} row {self.row}"


Content = Path | TarMember | TableCell


def bytes_of(content: Content) -> bytes:
    """The bytes of the picture at a place: a file, a part of a tar file, or a cell of a table.

    Raises:
        OSError, ValueError: the bytes cannot be read, or there are none.
        ConfigError: the table cannot be read.
    """
    match content:
        case TarMember(file, start, size):
            with file.open("rb") as opened:
                opened.seek(start)
                found = opened.read(size)
            if len(found) < size:
                raise ValueError("its shard has been cut short since it was read first")
            return found
        case TableCell(table, row):
            return cell_bytes(opened_table(table)[row][table.image])
    return content.read_bytes()


def cell_bytes(value: object) -> bytes:
    """The bytes of the picture that a table's cell holds.

    `value`: the bytes themselves, or a dict of Hugging Face's library with "bytes" or with the file "path".

    Raises:
        OSError, ValueError: the cell holds no bytes of a picture, or the file cannot be read.
    """
    found = value.get("bytes") if isinstance(value, dict) else value
    if found is None and isinstance(value, dict) and value.get("path"):
        return Path(value["path"]).read_bytes()
    if not isinstance(found, bytes):
        raise ValueError("the row holds no picture's bytes")
    return found


@lru_cache(maxsize=8)
def opened_table(table: SampleTable) -> Any:
    """The rows of a table as a data set of Hugging Face's library, read from disk on access; pictures are bytes.

    Raises:
        ConfigError: the extra is not installed, the table cannot be read, or it has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{table.files[0]}: tables are read by datasets: pip install 'diffusionpipe[data]'"
        ) from error
    datasets.disable_progress_bars()
    first = Path(table.files[0])
    try:
        if is_saved(first):
            found = datasets.load_from_disk(str(first))
            if isinstance(found, datasets.DatasetDict):
                if table.split not in found:
                    raise ConfigError(f"{first}: it has no split {table.split!r}; its splits are {', '.join(found)}")
                found = found[table.split]
        else:
            # Files without names of splits are all in "train".
            found = datasets.load_dataset(table_kind(first), data_files=list(table.files), split="train")
    except ConfigError:
        raise
    except Exception as error:  # readers of formats raise all kinds of errors
        raise ConfigError(
            f"{first}: the table cannot be read: {type(error).__name__}: {error}; write it again"
        ) from error
    if isinstance(found.features.get(table.image), datasets.Image):
        # Our own readers decode, with colour profiles and limits.
        found = found.cast_column(table.image, datasets.Image(decode=False))
    return found

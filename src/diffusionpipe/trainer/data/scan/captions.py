"""The facts about each picture of a folder: metadata.jsonl and metadata.csv files, .txt files beside the pictures.

`names` finds the pictures that are named.

    {"file_name": "cats/1.png", "text": "a cat", "label": 3}
    {"file_name": "cats/2.png", "text": ["a cat", "a small cat on a chair"]}

`file_name` is relative to the folder of its metadata file; every folder may have one. The first line of a metadata.csv
names its columns, and an empty cell says nothing. Where the metadata has no text, the file with the picture's name and
the ending .txt or .caption is the caption; where there is none, metadata.json says it, a list of such objects or an
object of names and texts. "conditioning_image", relative to the same folder, names the picture that steers a
ControlNet; it is not a sample of its own, unless it is steered too.
"""

import csv
import json
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from diffusionpipe.files.input_file import read_text

METADATA = "metadata.jsonl"
METADATA_FILES = (METADATA, "metadata.csv")
LISTS = "metadata.json"
SIDECARS = (".txt", ".caption")
"""The endings of caption files beside pictures, in small or capital letters; the first one that exists counts."""
UNREAD_TABLES = (".parquet", ".arrow", ".tsv", ".xlsx", ".json", ".jsonl", ".csv")
"""The endings of files that could hold captions, but are not read."""
MAX_CAPTION = 100_000
"""The largest number of characters of a caption; the longest text encoders read a few hundred words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The captions, the label and the conditioning picture that a folder's files state for one picture."""

    text: str | None = None
    """The first caption; None without any."""
    others: tuple[str, ...] = ()
    """The further captions."""
    label: int | None = None
    """The number of the picture's class; None without any."""
    condition: str | None = None
    """The path of its conditioning picture below the folder, with "/"; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The descriptions in a folder's metadata files by picture, and the lines that cannot be used."""

    descriptions: dict[str, Description]
    """The descriptions of pictures, by the picture's path below the folder, with "/"."""
    problems: tuple[str, ...]
    """A sentence for each line that cannot be used, with file and line number."""


def read_metadata(folder: Path, files: Sequence[str]) -> Metadata:
    """The descriptions in a folder's metadata files by picture, and a sentence for each unusable line.

    `files`: paths below the folder.
    """
    descriptions: dict[str, Description] = {}
    problems: list[str] = []
    for file in files:
        try:
            text = read_text(folder / file)
        except OSError as error:
            problems.append(f"{file}: {error.strerror or error}")
            continue
        except ValueError as error:
            problems.append(f"{file}: {error}")
            continue
        for number, row in _csv_rows(text) if file.endswith(".csv") else _json_rows(text):
            _add(descriptions, problems, file, f"line {number}", row)
    return Metadata(descriptions=descriptions, problems=tuple(problems))


def read_list(folder: Path, file: str) -> Metadata | None:
    """The descriptions in the metadata.json `file`, and its unusable entries; None if it is not a list of pictures."""
    try:
        found = json.loads(read_text(folder / file))
    except (OSError, ValueError, RecursionError):
        return None
    # Keys that look like names of files.
    if isinstance(found, dict) and found and all(Path(name).suffix for name in found):
        rows = [{"file_name": k, **v} if isinstance(v, dict) else {"file_name": k, "text": v} for k, v in found.items()]
    elif isinstance(found, list) and found and all(isinstance(row, dict) and "file_name" in row for row in found):
        rows = found
    else:
        return None
    descriptions: dict[str, Description] = {}
    problems: list[str] = []
    for number, row in enumerate(rows, start=1):
        _add(descriptions, problems, file, f"entry {number}", row)
    return Metadata(descriptions=descriptions, problems=tuple(problems))


def _add(
    descriptions: dict[str, Description],
    problems: list[str],
    file: str,
    place: str,
    row: dict[str, object] | ValueError,
) -> None:
    """Adds the description in one row of a file to `descriptions`, or a sentence to `problems` if it is unusable.

    `place`: the row in words, for the sentence. `row`: the row's values by key, or the error from reading it.
    """
    try:
        if isinstance(row, ValueError):
            raise row
        name, description = _described(row)
        name = _below(file, name)
        if description.condition is not None:
            description = replace(description, condition=_below(file, description.condition))
        if name in descriptions:
            raise ValueError(f"{name} is described twice; keep one of the lines")
        descriptions[name] = description
    except ValueError as error:
        problems.append(f"{file} {place}: {error}")


def read_caption(file: Path) -> str:
    """The text of a caption file, without the spaces around it.

    Raises:
        ValueError: the file is not UTF-8 text, cannot be read, or is longer than 100,000 characters.
    """
    try:
        text = read_text(file, MAX_CAPTION).strip()
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    _check_caption(text)
    return text


def _check_caption(text: str) -> None:
    """Refuses a text that cannot be a caption.

    Raises:
        ValueError: it is too long, or has a NUL: then the file is not text, or in another encoding.
    """
    if "\0" in text:
        raise ValueError("the caption holds a NUL character; write it as UTF-8 text")
    if len(text) > MAX_CAPTION:
        raise ValueError(f"the caption has {len(text):,} characters; use at most {MAX_CAPTION:,}")


def _below(metadata: str, name: str) -> str:
    """The path below the data folder of a file that the metadata file `metadata` names relative to itself."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(metadata), name))


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, object] | ValueError]]:
    """Yields the number of each line that is not empty, with its JSON object or the error from reading it."""
    # Not `splitlines`: a caption may hold U+2028, which JSON allows.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            yield number, ValueError(f"not JSON: {error.msg} at column {error.colno}")
        except ValueError as error:  # a number with thousands of digits
            yield number, error
        except RecursionError:
            yield number, ValueError("not usable: nested too deeply")
        else:
            is_object = isinstance(row, dict)
            yield number, row if is_object else ValueError('expected an object, {"file_name": ..., "text": ...}')


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, object] | ValueError]]:
    """Yields the first line's number of each row, with its cells by column or the error from reading it."""
    reader, before = csv.DictReader(StringIO(text, newline=""), strict=True), 1  # the line of the columns' names
    try:
        for cells in reader:
            number, before = before + 1, reader.line_num
            if cells.pop(None, None) is not None:  # the key of cells without a column
                yield number, ValueError('more cells than columns; put a text with commas between quotes, "')
                continue
            row: dict[str, object] = {name: cell for name, cell in cells.items() if cell}
            label = cells.get("label") or ""
            # Cells are texts, also where they are numbers.
            yield number, row | ({"label": int(label)} if label.isdecimal() and len(label) < 19 else {})
    except csv.Error as error:
        yield before + 1, ValueError(f"not CSV: {error}")


def _described(row: dict[str, object]) -> tuple[str, Description]:
    """The file name and the description in one row of metadata.

    Raises:
        ValueError: a value is missing or of another kind.
    """
    name, text, label = (row.get(key) for key in ("file_name", "text", "label"))
    if not isinstance(name, str) or not name:
        raise ValueError("file_name is missing; it names the picture")
    texts = _texts_in(text)
    if label is not None and (not isinstance(label, int) or isinstance(label, bool) or label < 0):
        raise ValueError(f"label is {json.dumps(label)}; expected a whole number from 0")
    condition = row.get("conditioning_image")
    if condition is not None and (not isinstance(condition, str) or not condition):
        raise ValueError(f"conditioning_image is {json.dumps(condition)}; expected the name of a picture")
    return name, Description(
        text=texts[0] if texts else None, others=tuple(texts[1:]), label=label, condition=condition
    )


def _texts_in(value: object) -> list[str]:
    """The captions in a row: a text, a list of texts, or none.

    Raises:
        ValueError: the value is none of these, or a text cannot be a caption.
    """
    if value is None:
        return []
    found = value if isinstance(value, list) else [value]
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found) or not found:
        raise ValueError(f"text is {json.dumps(value)}; expected a string, or a list of strings")
    for one in texts:
        _check_caption(one)
    return texts

"""The files of a data folder, below it and at the targets of its links."""

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from diffusionpipe.trainer.data.scan.captions import LISTS, METADATA_FILES, SIDECARS, UNREAD_TABLES

OVERLOOKED_FOLDERS = (
    "@eaDir",
    "@tmp",
    "#recycle",
    "#snapshot",
    "$RECYCLE.BIN",
    "System Volume Information",
    "lost+found",
    "__MACOSX",
)
"""The names of folders that a NAS, a file system or an archive makes for thumbnails or deleted files."""
OVERLOOKED_FILES = ("Thumbs.db", "ehthumbs.db", "desktop.ini")
_DOT = "names that begin with a dot"

_Identity = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The names of the files below a folder, with "/", sorted, by the use that is made of them."""

    read: tuple[str, ...]
    """The pictures or clips that are read as samples."""
    metadata: tuple[str, ...]
    """Files called metadata.jsonl or metadata.csv."""
    lists: tuple[str, ...]
    """Files called metadata.json."""
    sidecars: tuple[str, ...]
    """Files with the ending of caption files."""
    tables: tuple[str, ...]
    """Files that could hold captions, of kinds that are not read."""
    unread: tuple[str, ...]
    """Files with endings that are not read, though a user could mean them."""
    apart: tuple[str, ...]
    """Pictures or clips in the folder that is left out."""
    unknown: tuple[str, ...]
    """Other files, which are neither pictures nor captions."""
    dead: tuple[str, ...]
    """Links whose target is missing, without names of pictures or captions: files with such names are read, and
    refused."""
    overlooked: tuple[str, ...]
    """The numbers of files and folders that are never read, e.g. "3 of @eaDir"."""


def list_files(folder: Path, endings: tuple[str, ...], others: tuple[str, ...], apart: Path | None = None) -> Listing:
    """The names of all files below `folder`, sorted by their use.

    `endings`: of files that are read as samples. `others`: of files that are not read, though a user could mean them.

    Samples in the folder `apart` are listed as apart, and its other files left out, even if only links lead to it.
    """
    found: dict[str, list[str]] = {field.name: [] for field in fields(Listing)}
    overlooked: Counter[str] = Counter()
    for name, is_apart in _walk(folder, None if apart is None else _identity(apart), overlooked):
        small, last = name.lower(), name.rpartition("/")[2]
        if small.endswith(endings):
            found["apart" if is_apart else "read"].append(name)
        elif is_apart:
            continue
        elif last in METADATA_FILES:
            found["metadata"].append(name)
        elif last == LISTS:
            found["lists"].append(name)
        elif small.endswith(SIDECARS):
            found["sidecars"].append(name)
        elif small.endswith(UNREAD_TABLES):
            found["tables"].append(name)
        elif small.endswith(others):
            found["unread"].append(name)
        else:
            found["dead" if _is_dead(folder / name) else "unknown"].append(name)
    found["overlooked"] = [f"{number:,} of {kind}" for kind, number in overlooked.items()]
    return Listing(**{kind: tuple(sorted(names)) for kind, names in found.items()})


def _is_dead(path: Path) -> bool:
    """Whether the path is a link whose target is missing, or a link to itself."""
    return path.is_symlink() and _identity(path) is None


def endings_of(names: Sequence[str]) -> str:
    """The endings of these files as one text, the most frequent first; "without an ending" for files that have none."""
    found = Counter(posixpath.splitext(name)[1].lower() or "without an ending" for name in names)
    return " ".join(ending for ending, _ in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same folder, also through links; False where one is missing."""
    found = _identity(one)
    return found is not None and found == _identity(other)


def is_around(first: Path, second: Path) -> bool:
    """Whether one of two folders lies in the other, also through links; False if they are the same."""
    one, other = (Path(os.path.realpath(folder)) for folder in (first, second))
    return one != other and (one.is_relative_to(other) or other.is_relative_to(one))


def overlooked_part(name: str) -> str | None:
    """The first part of a path that is never read, such as ".git" or "Thumbs.db"; None if all parts are read."""
    return next((part for part in name.split("/") if _kind_of(part) is not None), None)


def _kind_of(part: str) -> str | None:
    """The kind of name for which a file or folder is never read; None if it is read."""
    if part.startswith("."):
        return _DOT
    return _OVERLOOKED.get(part.lower())


_OVERLOOKED = {name.lower(): name for name in (*OVERLOOKED_FOLDERS, *OVERLOOKED_FILES)}


def _looked_at(names: Sequence[str], overlooked: Counter[str]) -> list[str]:
    """The names of files or folders that are read; the others are counted in `overlooked`, by kind."""
    kinds = {name: _kind_of(name) for name in names}
    overlooked.update(kind for kind in kinds.values() if kind is not None)
    return [name for name, kind in kinds.items() if kind is None]


def _walk(folder: Path, apart: _Identity | None, overlooked: Counter[str]) -> Iterator[tuple[str, bool]]:
    """Yields the name of each file below the folder, and whether it lies in the folder `apart`.

    Files and folders that are never read are counted in `overlooked`, by kind.

    A link to a folder above it is not followed: that would never end.
    """
    around: dict[str, frozenset[_Identity | None]] = {os.fspath(folder): frozenset({_identity(folder)})}
    for directory, inner, files in os.walk(folder, followlinks=True):
        above = around.pop(directory)  # `os.walk` comes to each folder once
        entered = {name: _identity(Path(directory, name)) for name in _looked_at(inner, overlooked)}
        # In place: `os.walk` enters these alone.
        inner[:] = [name for name, identity in entered.items() if identity is not None and identity not in above]
        around.update((os.path.join(directory, name), above | {entered[name]}) for name in inner)
        below, is_apart = Path(directory).relative_to(folder), apart is not None and apart in above
        yield from (((below / name).as_posix(), is_apart) for name in _looked_at(files, overlooked))


def _identity(folder: Path) -> _Identity | None:
    """A key that a folder and every link to it share; None if there is no such folder."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

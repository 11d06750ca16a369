"""The manifest of a checkpoint: size and checksum of each of its files.

A file with a flipped bit holds tensors like any other, so every file is compared before any tensor is loaded.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.input_file import problem_of_file, read_json
from diffusionpipe.files.output_file import sync, write_durably
from diffusionpipe.units import Bytes

MANIFEST = "manifest.json"
_FORMAT = 2
"""The number of the form in which checkpoints are written; form 1 had files of torch.distributed.checkpoint."""
_READ = (1, 2)
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The name, size and checksum of one file of a checkpoint."""

    name: str
    """The file's name inside the checkpoint's folder."""
    size: Bytes
    """The length of the file in bytes."""
    blake2b: str
    """The hexadecimal BLAKE2b checksum, 32 bytes, of its contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json: the step, the checkpoint's number in the order of writing, and its files."""

    step: int
    """The number of updates that were done before the checkpoint."""
    sequence: int
    """The checkpoint's number in the order of writing, from 1; it differs from the order of steps after a return to an
    earlier checkpoint."""
    files: tuple[FileRecord, ...]
    """The records of all files of the checkpoint but the manifest itself."""


def describe_files(folder: Path, names: Iterable[str]) -> tuple[FileRecord, ...]:
    """The records of the files with these names, in their order; reads the files whole, four at a time."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return tuple(threads.map(lambda name: _describe(folder, name), names))


def check_files(folder: Path, records: Sequence[FileRecord]) -> list[str]:
    """A sentence for each file that is missing or differs from its record in size or checksum; [] if none.

    Checksums are compared only where all sizes are right.
    """
    problems = [problem for record in records if (problem := _size_problem(folder, record))]
    if problems:
        return problems
    found = describe_files(folder, (record.name for record in records))
    return [
        f"{record.name} was altered: its checksum is {now.blake2b[:12]}... instead of {record.blake2b[:12]}..."
        for record, now in zip(records, found, strict=True)
        if now != record
    ]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json into the folder, and syncs the file and the folder to the disk."""
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1) + "\n"
    write_durably(folder / MANIFEST, text.encode())
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        CheckpointError: it is missing, cannot be read, is not a regular file, or was written by another version.
    """
    try:
        content: Any = read_json(folder / MANIFEST)  # checked below
        if content["format"] not in _READ:
            raise CheckpointError(
                f"{folder.name} has format {content['format']!r}; this version of DiffusionPipe reads formats "
                f"{' and '.join(map(str, _READ))}"
            )
        return Manifest(
            step=int(content["step"]),
            sequence=int(content["sequence"]),
            files=tuple(map(_record, content["files"])),
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder.name} has no {MANIFEST}, so it is not a finished checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{MANIFEST} of {folder.name} cannot be read: {error}") from error


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """A sentence for each file in the folder that is neither the manifest nor listed in it; [] if none."""
    known = {MANIFEST, *(record.name for record in manifest.files)}
    strangers = sorted(name for name in os.listdir(folder) if name not in known)
    return [f"{name!r} is not in {MANIFEST}, so nothing vouches for it; move it out" for name in strangers]


def _record(data: Mapping[str, object]) -> FileRecord:
    """The file's record that an entry of manifest.json states.

    Raises:
        ValueError: a value has another type, or the name is not of a file in the checkpoint's folder itself.
        TypeError: the entry has other fields.
    """
    record = FileRecord(**data)  # type: ignore[arg-type]  # the types are checked here
    if not (isinstance(record.name, str) and isinstance(record.size, int) and isinstance(record.blake2b, str)):
        raise ValueError(f"a record has values of other types: {str(dict(data))[:200]}")
    if record.name in ("", ".", "..") or "/" in record.name or "\0" in record.name:
        raise ValueError(f"{record.name!r} is not the name of a file of the checkpoint")
    return record


def _describe(folder: Path, name: str) -> FileRecord:
    """The record of a file, which is read whole for its size and checksum."""
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return FileRecord(name=name, size=file.tell(), blake2b=digest.hexdigest())  # the length that was read


def _size_problem(folder: Path, record: FileRecord) -> str | None:
    """A sentence if the file is missing, is not a regular file or has another size; None if it is as recorded."""
    path = folder / record.name
    if problem := problem_of_file(path):
        return f"{record.name}: {problem}"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{record.name} is missing"
    return None if size == record.size else f"{record.name} has {size} bytes instead of {record.size}"

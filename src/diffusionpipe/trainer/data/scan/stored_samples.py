"""Samples in shards and tables: found once, so that each has a number, and read from there.

A shard is a tar file as WebDataset writes it. Members in a row with the same name up to its first dot are a sample:

    owls/1.jpg  owls/1.txt  owls/1.cls  |  owls/2.jpg  owls/2.json ({"caption": "an owl", "label": 3})

The index has the place of each picture's bytes, so a sample is read without those before it, in any order.
"""

import json
import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusionpipe.errors import DataError
from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.content import Content, SampleTable, TableCell, TarMember, opened_table
from diffusionpipe.trainer.data.places import files_of
from diffusionpipe.trainer.data.scan.captions import MAX_CAPTION, Description
from diffusionpipe.trainer.data.scan.columns import Columns
from diffusionpipe.trainer.data.scan.dataset import (
    ENDINGS,
    STRICT,
    Condition,
    Dataset,
    Findings,
    Progress,
    Sample,
    ScanRules,
    SourcePart,
    digest_of,
    headers_of,
    raise_all,
)
from diffusionpipe.trainer.data.scan.skipped import FILE as SKIPPED

_TEXTS = ("txt", "caption", "text")
_KEYS = ("caption", "text", "prompt")
"""The keys of a caption in a member's JSON; the first one that exists counts."""


@dataclass(slots=True)
class _Found:
    """The samples that were found in shards or a table, before their pictures are opened; all by name."""

    contents: dict[str, Content] = field(default_factory=dict)
    """The place of each picture's bytes."""
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The same place as numbers: (shard, first byte, number of bytes), (row of a table,), or () for a file."""
    descriptions: dict[str, Description] = field(default_factory=dict)
    """The captions and the label of each sample."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each shard, row or sample that cannot be used."""
    unread: list[str] = field(default_factory=list)
    """The names of samples without a picture."""


def examine_shards(
    path: Path, need: Condition, *, progress: Progress | None = None, rules: ScanRules = STRICT
) -> tuple[Dataset, Findings]:
    """The samples of tar files as WebDataset writes them, and further findings; every picture is opened.

    `need`: the description that each sample must have.

    Raises:
        DataError: a shard, a sample or a picture cannot be used; every kind of problem is listed.
    """
    files, found = files_of(path), _Found()
    base = Path(os.path.commonpath([file.parent for file in files]))
    for number, file in enumerate(files):
        try:
            for name, entry in _samples_of(file):
                _add_member(found, f"{file.relative_to(base)}/{name}", file, number, entry)
        except (tarfile.TarError, OSError, EOFError) as error:
            why = "it is compressed; unpack it with gunzip" if file.suffix.lower() in (".gz", ".tgz") else str(error)
            found.problems.append(f"{file}: {why}")
        except ValueError as error:
            found.problems.append(f"{file}: {error}")
    part = SourcePart(name="", folder=path, count=0, repeats=1, files=tuple(map(str, files)))
    return _examined(part, found, need, progress, rules)


def examine_table(
    path: Path, need: Condition, *, columns: Columns, progress: Progress | None = None, rules: ScanRules = STRICT
) -> tuple[Dataset, Findings]:
    """The samples of a table, row by row, and further findings; every picture is opened.

    `need`: the description that each sample must have.

    Raises:
        ConfigError: the extra is missing, a column is missing, or rows or pictures cannot be used.
    """
    files, found = files_of(path), _Found()
    table = SampleTable(tuple(map(str, files)), columns.split, columns.image)
    rows = opened_table(table)
    names = list(rows.column_names)
    if columns.image not in names:
        raise DataError(f"{path}: it has no column {columns.image!r}; name one of {', '.join(names)} as columns.image")
    part = SourcePart(
        name="", folder=path, count=0, repeats=1, files=table.files, split=columns.split, image=columns.image
    )
    # Without the pictures, whose bytes would be read with every row.
    about = rows.select_columns([name for name in (columns.text, columns.label) if name in names])
    is_path = getattr(rows.features[columns.image], "dtype", "") in ("string", "large_string")
    for number in range(len(rows)):
        name = f"{number:08d}"
        place: tuple[int, ...] = (number,)
        content: Content = TableCell(table, number)
        if is_path:
            name, place = str(rows[number][columns.image]), ()
            content = files[0].parent / name
        if name in found.contents:
            found.problems.append(f"row {number}: {name} is named twice; keep one of the rows")
            continue
        found.contents[name], found.places[name] = content, place
        row = about[number] if about.column_names else {}
        try:
            found.descriptions[name] = described(row.get(columns.text), row.get(columns.label))
        except ValueError as error:
            found.problems.append(f"row {number}: {error}")
    if is_path:
        part = SourcePart(name="", folder=files[0].parent, count=0, repeats=1)  # the pictures are files of their own
    return _examined(part, found, need, progress, rules)


def _examined(
    part: SourcePart, found: _Found, need: Condition, progress: Progress | None, rules: ScanRules
) -> tuple[Dataset, Findings]:
    names = sorted(found.contents)
    headers = headers_of(part.folder, {name: found.contents[name] for name in names}, progress)
    unreadable = dict(headers.problems)
    kept = [name for name in names if name not in unreadable]
    problems: dict[str, Sequence[str]] = {
        "places that cannot be used": found.problems,
        f"pictures without a {need}": [
            name
            for name in kept
            # `need` is the name of the field too.
            if need is not Condition.NOTHING and getattr(found.descriptions.get(name, Description()), need) is None
        ],
    }
    if rules.skipping is not None and unreadable:
        rules.skipping.leave_out({rules.prefix + name: why for name, why in unreadable.items()})
    else:
        problems["pictures that cannot be read"] = [f"{name}: {why}" for name, why in unreadable.items()]
    reported = [
        f"{counted(len(examples), kind)}, e.g. {examples[0]}" for kind, examples in problems.items() if examples
    ]
    if not rules.reports:
        raise_all(part.folder, problems)
    if not kept:
        raise DataError(f"{part.folder}: it holds no pictures that can be read; expected {', '.join(ENDINGS)}")
    samples = tuple(_sample(name, found) for name in kept)
    left_out = [f"{counted(len(unreadable), 'pictures')} that cannot be read ({SKIPPED} lists them)"]
    lone = [f"{counted(len(found.unread), 'samples have')} no picture, e.g. {found.unread[0]}"] if found.unread else []
    dataset = Dataset(
        folder=part.folder,
        samples=samples,
        contents=headers.contents,
        parts=(
            SourcePart(
                name=part.name,
                folder=part.folder,
                count=len(samples),
                repeats=1,
                files=part.files,
                split=part.split,
                image=part.image,
            ),
        ),
    )
    findings = Findings(
        noun="pictures",
        sizes=tuple(headers.sizes.get(name) for name in kept),
        files={name: digest_of(headers.digests[name], found.descriptions.get(name)) for name in kept},
        overlooked=(*(reported if rules.reports else left_out if unreadable else ()), *lone),
    )
    return dataset, findings


def _sample(name: str, found: _Found) -> Sample:
    about = found.descriptions.get(name, Description())
    return Sample(name=name, text=about.text, others=about.others, label=about.label, place=found.places[name])


def described(text: Any, label: Any) -> Description:
    """The captions and the label in the cells of a row of a table, or in a sample's members of a shard.

    `text`: a text, a list of texts or None. `label`: a whole number from 0 or None.

    Raises:
        ValueError: a value has another type, or a caption is too long.
    """
    texts = [] if text is None else list(text) if isinstance(text, list | tuple) else [text]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError(f"its caption is {text!r:.60}; expected a text, or a list of texts")
    if any("\0" in one or len(one) > MAX_CAPTION for one in texts):
        raise ValueError(f"its caption holds a NUL character, or more than {MAX_CAPTION:,} characters")
    if label is not None and (not isinstance(label, int) or isinstance(label, bool) or label < 0):
        raise ValueError(f"its label is {label!r:.60}; expected a whole number from 0")
    return Description(text=texts[0] if texts else None, others=tuple(texts[1:]), label=label)


@dataclass(slots=True)
class _Entry:
    """The members of a shard that form one sample."""

    picture: tuple[int, int] | None = None
    """The first byte and the number of bytes of its picture; None without a picture."""
    ending: str = ""
    """The ending of the picture's name."""
    said: dict[str, bytes] = field(default_factory=dict)
    """The contents of the members with captions and labels, by their endings: "txt", "json", "cls"."""


def _samples_of(file: Path) -> Iterator[tuple[str, _Entry]]:
    """Yields the name and the members of each sample of a shard, in their order.

    Raises:
        ValueError: a member lies outside of the shard's folder, or a sample has two members of one kind.
        tarfile.TarError: the file is not a tar file, or cut short.
    """
    key, entry, seen = "", _Entry(), set[str]()
    # "r:": not compressed, because a sample is read from its place in the file.
    with tarfile.open(file, "r:") as opened:
        for member in opened:
            if not member.isfile():
                if not member.isdir():
                    raise ValueError(f"its member {member.name} is a link or a device; pack the file itself")
                continue
            name = posixpath.normpath(member.name)
            if name.startswith(("/", "..")):
                raise ValueError(f"its member {member.name} lies outside of the shard's folder; pack it again")
            folder, _, last = name.rpartition("/")
            stem, _, ending = last.partition(".")  # up to the first dot, as WebDataset reads names
            if not stem or not ending:
                continue
            own = f"{folder}/{stem}" if folder else stem
            if own != key:
                if key:
                    yield key, entry
                if own in seen:
                    raise ValueError(f"the members of {own} are not one after the other; sort them by name")
                key, entry = own, _Entry()
                seen.add(own)
            small = ending.lower()
            if f".{small}" in ENDINGS:
                if entry.picture is not None:
                    raise ValueError(f"{own} has two pictures, .{entry.ending} and .{ending}; keep one")
                entry.picture, entry.ending = (member.offset_data, member.size), ending
            elif small in (*_TEXTS, "json", "cls"):
                if small in entry.said:
                    raise ValueError(f"{own} has two members .{small}; keep one")
                handle = opened.extractfile(member)
                # A character has up to four bytes in UTF-8.
                entry.said[small] = b"" if handle is None else handle.read(4 * MAX_CAPTION)
    if key:
        yield key, entry


def _add_member(found: _Found, name: str, file: Path, number: int, entry: _Entry) -> None:
    if entry.picture is None:
        found.unread.append(name)
        return
    full = f"{name}.{entry.ending}"
    start, size = entry.picture
    found.contents[full] = TarMember(file, start, size, full.rpartition(".tar/")[2])
    found.places[full] = (number, start, size)
    try:
        found.descriptions[full] = _said(entry.said)
    except ValueError as error:
        found.problems.append(f"{full}: {error}")


def _said(members: Mapping[str, bytes]) -> Description:
    """The captions and the label in a sample's members that are not its picture.

    Raises:
        ValueError: a member holds something else.
    """
    about = json.loads(members["json"]) if "json" in members else {}
    about = about if isinstance(about, dict) else {}
    text = next((members[name].decode().strip() for name in _TEXTS if name in members), None)
    if text is None:
        text = next((about[key] for key in _KEYS if about.get(key) is not None), None)
    label = int(members["cls"].decode()) if "cls" in members else about.get("label")
    return described(text, label)

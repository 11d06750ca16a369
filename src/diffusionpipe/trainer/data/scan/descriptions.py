"""The descriptions in a folder's files of its pictures, by the names of the pictures.

The text of a picture comes from metadata.jsonl or metadata.csv, else from the file beside it, else metadata.json's.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffusionpipe.trainer.data.scan.captions import METADATA, Description, read_caption, read_list, read_metadata
from diffusionpipe.trainer.data.scan.listing import Listing
from diffusionpipe.trainer.data.scan.names import Names, found_descriptions, lone_sidecars, sidecars_of

logger = logging.getLogger(__name__)

_LIST_FORM = "a list of file_name and text, or file names with their texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderDescriptions:
    """The descriptions of a folder's pictures by source: metadata files, metadata.json, files beside pictures."""

    descriptions: dict[str, Description]
    """The descriptions of pictures, by the picture's name."""
    lists: dict[str, Description]
    """The descriptions in metadata.json by the picture's name, for facts that no other file states."""
    sidecars: dict[str, str]
    """The name of the caption file of each picture that has one, by the picture's name."""
    lone_sidecars: tuple[str, ...]
    """The names of caption files that belong to no picture."""
    names: Names
    """The names of all pictures, which finds the pictures that metadata name."""
    problems: Sequence[str]
    """A sentence for each line of metadata that cannot be used."""


def read_known(folder: Path, listing: Listing) -> FolderDescriptions:
    """The descriptions in a folder's metadata files, and each picture's caption file, whose text is not yet read.

    A metadata.json that is not a list of pictures is named in the log.
    """
    names, apart = Names((*listing.read, *listing.apart)), set(listing.apart)
    metadata = read_metadata(folder, listing.metadata)
    found, twice = found_descriptions(metadata.descriptions, names)
    lists: dict[str, Description] = {}
    problems = [*metadata.problems, *twice]
    for file in listing.lists:
        read = read_list(folder, file)
        if read is None:
            logger.warning('data=%s left_out=%s expected="%s" remedy="write %s"', folder, file, _LIST_FORM, METADATA)
            continue
        said, twice = found_descriptions(read.descriptions, names)
        lists |= said
        problems += [*read.problems, *twice]
    # The other files come before metadata.json.
    for name, about in lists.items():
        own = found.get(name, Description())
        if about.condition is not None and own.condition is None:
            found[name] = replace(own, condition=about.condition)
    return FolderDescriptions(
        descriptions={name: about for name, about in found.items() if name not in apart},
        lists=lists,
        sidecars=sidecars_of(listing.read, listing.sidecars),
        lone_sidecars=lone_sidecars((*listing.read, *listing.apart, *listing.unread), listing.sidecars),
        names=names,
        problems=problems,
    )


def unread_tables(listing: Listing) -> str:
    """A remark in parentheses on files that could hold captions and are not read, for an error; "" for none."""
    if not listing.tables:
        return ""
    more = f" and {len(listing.tables) - 1} more" if len(listing.tables) > 1 else ""
    return f" ({listing.tables[0]}{more} is not read: write its rows into {METADATA})"


def described_pictures(
    folder: Path, pictures: Sequence[str], known: FolderDescriptions, *, need_text: bool
) -> tuple[dict[str, Description], list[str]]:
    """A description of every picture by name, and "file: reason" for each caption file that cannot be read.

    Caption files are read only with `need_text`, where metadata have no text.
    """
    result, problems = {}, []
    for name in pictures:
        about = known.descriptions.get(name, Description())
        sidecar = known.sidecars.get(name)
        if need_text and about.text is None and sidecar is not None:
            try:
                about = replace(about, text=read_caption(folder / sidecar))
            except ValueError as error:
                about = replace(about, text="")  # reported here, so not as missing too
                problems.append(f"{sidecar}: {error}")
        weak = known.lists.get(name, Description())
        said = weak if about.text is None else about
        result[name] = Description(
            text=said.text,
            others=said.others,
            label=weak.label if about.label is None else about.label,
            condition=about.condition,
        )
    return result, problems

"""Finds the pictures that metadata name, even if the names were written on another machine.

A letter with an accent is one character in NFC and two in NFD: macOS writes NFD into file names, most editors NFC into
texts. Windows puts backslashes between folders. An exact name comes first.
"""

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from unicodedata import normalize

from diffusionpipe.ir.locales import as_utf8
from diffusionpipe.trainer.data.scan.captions import SIDECARS, Description
from diffusionpipe.trainer.data.scan.listing import overlooked_part


class Names:
    """The names of files below a folder, found also where accents or slashes are written in another way."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._alike: dict[str, list[str]] = defaultdict(list)
        for name in self._names:
            self._alike[_key(name)].append(name)
        self._small = {name.casefold(): name for name in self._alike}

    def find(self, name: str) -> str:
        """The name of the file that the name in a metadata file means; `name` itself if no file fits, or several do."""
        # The name as written comes first: on Linux a file's name may hold a backslash.
        for wanted in (name, posixpath.normpath(name.replace("\\", "/"))):
            if wanted in self._names:
                return wanted
            alike = self._alike.get(_key(wanted), ())
            if len(alike) == 1:  # several files that differ in accents alone: none is meant for sure
                return alike[0]
        return name

    def explain(self, name: str) -> str:
        """The name of a missing file for a message, with a hint in parentheses if there is one.

        Hints are that such a name is never read, or that a file has the name in other capital letters.
        """
        if (part := overlooked_part(name.replace("\\", "/"))) not in (None, ".", ".."):
            return f"{name} ({part} is never read)"
        near = self._small.get(_key(name).replace("\\", "/").casefold())
        return name if near is None else f"{name} (the folder has {near})"


def found_descriptions(
    descriptions: Mapping[str, Description], names: Names
) -> tuple[dict[str, Description], list[str]]:
    """The descriptions by the real names of the files, and a sentence for each file that has two descriptions.

    `descriptions`: by the names in metadata files.
    """
    result: dict[str, Description] = {}
    problems = []
    for name, about in descriptions.items():
        own = names.find(name)
        if own in result:
            problems.append(f"{own} is described twice, under names that mean the same; keep one of the lines")
        condition = None if about.condition is None else names.find(about.condition)
        result[own] = replace(about, condition=condition)
    return result, problems


def sidecars_of(pictures: Iterable[str], sidecars: Iterable[str]) -> dict[str, str]:
    """The name of the caption file of each picture that has one, by the picture's name.

    The ending may have capital letters, and accents may be written in another way.
    """
    # The last file of a stem is kept, so the kind that counts first comes last.
    ranked = sorted(sidecars, key=_rank, reverse=True)
    of_stem = {_stem(_key(name)): name for name in ranked}
    exact = {_stem(name): name for name in ranked}
    found = {}
    for picture in pictures:
        stem = _stem(picture)
        sidecar = exact.get(stem) or of_stem.get(_key(stem))
        if sidecar is not None:
            found[picture] = sidecar
    return found


def lone_sidecars(pictures: Iterable[str], sidecars: Iterable[str]) -> tuple[str, ...]:
    """The caption files that belong to none of these pictures, in their order."""
    stems = {_stem(_key(name)) for name in pictures}
    return tuple(name for name in sidecars if _stem(_key(name)) not in stems)


def _key(name: str) -> str:
    """A key that all spellings of one file name share, even if the locale is not one of UTF-8."""
    return normalize("NFC", as_utf8(name))


def _rank(name: str) -> tuple[int, bool]:
    """The rank of a caption file among files of one stem: .txt, .TXT, .caption, .CAPTION; the smallest counts."""
    ending = posixpath.splitext(name)[1]
    return SIDECARS.index(ending.lower()), ending != ending.lower()


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]

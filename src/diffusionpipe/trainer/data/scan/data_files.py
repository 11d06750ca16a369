"""The files of a run's training data, in data.json of its folder: those at its start, and those that came later.

    {"generations": [{"since": 0, "files": {"a.png": "0f3c...", "b.png": "77aa..."}},
                     {"since": 40, "files": {"c.png": "91d2..."}}]}

Each file has a digest of its picture and of its captions and label. `since` is the position in the order of the data
from which on the files count; they enter with the epoch that begins there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffusionpipe.errors import CheckpointError, DataError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.order import growth_of, next_epoch

FILE = "data.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Files of training data that count from one position of the data's order on, each with a digest."""

    since: int
    """The position in the order of the data from which on the files count."""
    files: dict[str, str]
    """The digest of each file's content and description, by the file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """The content of data.json: all files of a run's training data, by the position at which they entered."""

    generations: tuple[Generation, ...]
    """The files that entered together, in the order of their positions."""

    def since_of(self) -> dict[str, int]:
        """For each file, by name, the position in the order of the data from which on it counts."""
        return {name: one.since for one in self.generations for name in one.files}


def first_ledger(files: Mapping[str, str]) -> DataFiles:
    """The list of files of a run that begins: all count from position 0 on.

    `files`: digests by name.
    """
    return DataFiles(generations=(Generation(since=0, files=dict(files)),))


def write_ledger(folder: Path, ledger: DataFiles) -> None:
    """Writes the list of files as data.json into a run's folder."""
    generations = [{"since": one.since, "files": one.files} for one in ledger.generations]
    write_atomically(folder / FILE, json.dumps({"generations": generations}) + "\n")


def read_ledger(folder: Path) -> DataFiles | None:
    """The list of files in data.json of a run's folder; None where an older version has written none.

    Raises:
        DataError: the file cannot be read.
    """
    path = folder / FILE
    try:
        return _parsed(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; restore it, or start a new run in another run.folder"
        ) from error


def _parsed(found: object) -> DataFiles:
    """The list of files that a JSON value states.

    Raises:
        ValueError: the value has another form.
    """
    generations = found.get("generations") if isinstance(found, dict) else None
    if not isinstance(generations, list) or not generations:
        raise ValueError("it is not written by a run")
    result = []
    for one in generations:
        since, files = (one.get("since"), one.get("files")) if isinstance(one, dict) else (None, None)
        if type(since) is not int or since < 0 or not isinstance(files, dict):  # a bool is an int too
            raise ValueError("a generation needs a position from 0 and files")
        if not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError("digests are texts")
        result.append(Generation(since=since, files=files))
    return DataFiles(generations=tuple(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The position in the order of the data at which a run continues, and whether new files may enter."""

    position: int
    """The position in the order of the data at which the run continues."""
    may_grow: bool
    """Whether new files may enter."""
    noun: str
    """The kind of the files in the plural, e.g. "pictures"."""


def continued(ledger: DataFiles, files: Mapping[str, str], samples: Sequence[str], at: Continuation) -> DataFiles:
    """The list of files of a run that continues: `ledger`, and new files among `files` from the next epoch on.

    `files`: the present digests by name. `samples`: the names of all samples that are trained on, repeated ones too.
    `at`: the place at which the run continues.

    Raises:
        CheckpointError: files that the run has used are gone or different, or new ones may not enter.
    """
    # The files of a generation whose position is yet to come have entered no epoch, and may still change.
    used = tuple(one for one in ledger.generations if one.since < at.position or one.since == 0)
    waiting = [_present(one, files) for one in ledger.generations if one not in used]
    known = {name: digest for one in used for name, digest in one.files.items()}
    announced = {name for one in waiting for name in one.files}
    gone = [name for name in known if name not in files]
    different = [name for name, digest in known.items() if files.get(name, digest) != digest]
    new = {name: digest for name, digest in files.items() if name not in known and name not in announced}
    lost = [*_examples(len(gone), f"{at.noun} are gone", gone)]
    lost += _examples(len(different), f"{at.noun} or captions are different", different)
    if lost or (new and not at.may_grow):
        added = _examples(len(new), f"{at.noun} are new", list(new))
        raise CheckpointError(_refusal([*lost, *added], has_lost=bool(lost), has_new=bool(new)))
    kept = (*used, *(one for one in waiting if one.files))
    if new:
        before = DataFiles(generations=kept)
        since = before.since_of()
        # By sample: a repeated picture counts as often as it is repeated.
        trained = [since[name] for name in samples if name in since]
        growth = growth_of([(position, 1) for position in trained])
        kept += (Generation(since=next_epoch(at.position, len(trained), growth), files=new),)
    return DataFiles(generations=kept)


def _present(generation: Generation, files: Mapping[str, str]) -> Generation:
    """The generation with its files that still exist, and their present digests; it has not entered yet."""
    return replace(generation, files={name: files[name] for name in generation.files if name in files})


def _examples(number: int, phrase: str, names: Sequence[str]) -> list[str]:
    return [f"{counted(number, phrase)}, e.g. {names[0]}"] if number else []


def _refusal(found: Sequence[str], *, has_lost: bool, has_new: bool) -> str:
    ways = []
    if has_lost:
        ways.append("restore them as they were")
    if has_new:
        ways.append("set data.allow_growth = true, so that new ones enter at the next epoch")
    way = f"{' and '.join(ways)}, or start a new run in another run.folder"
    return f"data.train is not the data of this run: {'; '.join(found)}.\n{way[0].upper()}{way[1:]}."

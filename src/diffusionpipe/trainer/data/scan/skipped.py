"""Training pictures that could not be decoded and were replaced: a line for each in skipped.jsonl of the run's folder.

    {"step": 12, "position": 3, "skipped": "birds/7.jpg", "instead": "birds/41.jpg", "reason": "OSError: ..."}

A picture that is damaged in its header is left out when the folder is read, before the first step:

    {"step": null, "position": null, "skipped": "birds/8.jpg", "instead": null, "reason": "it is empty"}

The process that decodes writes the line, before the batch is used. Several may write the same one: ranks that encode
different parts of a sample decode it each, and a resumed run decodes the batches again that were ready ahead.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from diffusionpipe.errors import DataError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.ir.codec import decode
from diffusionpipe.ir.words import counted

FILE = "skipped.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sample that was replaced in one step, or that was left out of all steps."""

    step: int | None
    """The number of steps that were done before the step; None: the sample was left out of all steps."""
    position: int | None
    """The position of the sample in the global batch; None: the sample was left out of all steps."""
    skipped: str
    """The name of the sample."""
    instead: str | None
    """The name of the sample in its place; None: the sample was left out of all steps."""
    reason: str
    """The reason why it cannot be decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """The list of skipped pictures in the run's folder, and the largest number of different pictures in it."""

    folder: Path
    """The run's folder, which has the list."""
    most: int
    """The largest number of different pictures that may be skipped."""

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Adds pictures that are left out of all steps to the list.

        `reasons`: why each is left out, by its name.

        Pictures that the list has already are not added again.

        Raises:
            DataError: more than `most` different pictures are listed; the message names the list.
        """
        listed = {one.skipped for one in read_skipped(self.folder) if one.step is None}
        left_out = [
            Skipped(step=None, position=None, skipped=name, instead=None, reason=reason)
            for name, reason in reasons.items()
            if name not in listed
        ]
        self.note(*left_out)

    def note(self, *skipped: Skipped) -> None:
        """Adds skipped samples to the list.

        Raises:
            DataError: more than `most` different pictures are listed, or the list is damaged; the message names the
                list.
        """
        lines = "".join(json.dumps(asdict(one)) + "\n" for one in skipped)
        descriptor = os.open(self.folder / FILE, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, lines.encode())  # in one piece, so that lines of several processes do not mix
        finally:
            os.close(descriptor)
        pictures = {one.skipped for one in read_skipped(self.folder)}
        if len(pictures) > self.most:
            raise DataError(
                f"{counted(len(pictures), 'pictures cannot be decoded')}, more than data.max_skipped = {self.most}; "
                f"{self.folder / FILE} lists them. Repair or remove them, or raise data.max_skipped"
            )


def read_skipped(folder: Path) -> frozenset[Skipped]:
    """The entries of skipped.jsonl in a run's folder, each once; empty where there is no such file.

    Raises:
        DataError: the list is damaged; the message names the file and the line.
    """
    path = folder / FILE
    if problem := problem_of_file(path):
        raise DataError(f"{path}: {problem}; remove it")
    if not path.exists():
        return frozenset()
    try:
        found = path.stat()
        return _parsed(path, (found.st_ino, found.st_mtime_ns, found.st_size))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; remove it") from error


@lru_cache(maxsize=1)
def _parsed(path: Path, state: tuple[int, ...]) -> frozenset[Skipped]:
    """The entries of a list of skipped samples.

    The result is kept for the next call: it is asked for at every step, and the file changes seldom. `state`: number,
    date and size of the file, by which a changed file is read again.
    """
    # The last piece is empty, or a line that is being written.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return frozenset(_entry(path, number, line) for number, line in enumerate(lines, start=1))


def _entry(path: Path, number: int, line: str) -> Skipped:
    problems: list[str] = []
    try:
        found = decode(Skipped, json.loads(line), "", problems)
    except (ValueError, RecursionError) as error:
        problems.append(str(error))
    if problems:
        raise DataError(f"{path} line {number}: {problems[0]}; remove the line")
    assert isinstance(found, Skipped)
    return found


def count_skipped(folder: Path, step: int) -> int:
    """The number of samples that were replaced in the first `step` steps.

    It is the same on every layout and after resuming.

    Raises:
        DataError: the list is damaged.
    """
    return len({(one.step, one.position) for one in read_skipped(folder) if one.step is not None and one.step < step})

"""The files of a run folder as a page needs them, each read again only where it has changed.

A report reads each file once. `diffusionpipe watch` keeps these values for as long as it serves, so an unchanged run
costs a look at the times and sizes of its files, and a run that trains its new lines and pictures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from diffusionpipe.trainer.course.documents import SURVEY_FILE
from diffusionpipe.trainer.reporting.metrics import METRICS
from diffusionpipe.trainer.reporting.rank_memory import FOLDER as MEMORY
from diffusionpipe.workflows.report.data import data_of
from diffusionpipe.workflows.report.metrics import Metrics, MetricsFile, memory_curve
from diffusionpipe.workflows.report.recipe import RECIPE, recipe_of
from diffusionpipe.workflows.report.samples import FOLDER as SAMPLES
from diffusionpipe.workflows.report.samples import samples_of, small_picture

if TYPE_CHECKING:
    from diffusionpipe.workflows.report.figures import Json

T = TypeVar("T")
_DOCUMENTS = (".json", ".toml")
"""Endings of the files beside metrics.jsonl that a page may read."""


class RunFiles:
    """Reads the files of one run folder for a page. Mutable: keeps its parts while their files stay the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = MetricsFile(folder)
        self._parts: dict[str, tuple[Hashable, object]] = {}
        self._pictures: dict[Path, tuple[Hashable, Json | str]] = {}

    def state(self) -> Hashable:
        """A value that differs from earlier ones as soon as a file that a page reads was changed, made or removed."""
        metrics, memory, samples = self.folder / METRICS, self.folder / MEMORY, self.folder / SAMPLES
        return self._documents(), _state(metrics), tuple(_below(memory)), tuple(_below(samples))

    def metrics(self) -> Metrics:
        """The numbers of the run by step; only new lines are read."""
        return self._metrics.read()

    def recipe(self) -> dict[str, object] | str:
        """Key -> value of the run's recipe, or the reason as a text why there are none; see `recipe_of`."""
        return self._part("recipe", _state(self.folder / RECIPE), lambda: recipe_of(self.folder))

    def data(self) -> Json:
        """The page's part about the training data; see `data_of`."""
        return self._part("data", _state(self.folder / SURVEY_FILE), lambda: data_of(self.folder))

    def memory(self) -> list[Json]:
        """The page's chart of each rank's memory by step; see `memory_curve`."""
        return self._part("memory", tuple(_below(self.folder / MEMORY)), lambda: memory_curve(self.folder))

    def of_documents(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, called again only after the plan or another document in the folder has changed.

        `name`: the key under which the result is kept.
        """
        return self._part(name, self._documents(), make)

    def samples(self, most: int) -> Json:
        """The page's part with about `most` pictures of samplings at most; unchanged files are not read again."""
        before, self._pictures = self._pictures, {}

        def small(path: Path) -> Json | str:
            state, kept = _state(path), before.get(path)
            self._pictures[path] = kept if kept and kept[0] == state else (state, small_picture(path))
            return self._pictures[path][1]

        return samples_of(self.folder, most, small)

    def _documents(self) -> Hashable:
        return tuple((path, state) for path, state in _entries(self.folder) if path.endswith(_DOCUMENTS))

    def _part(self, name: str, state: Hashable, make: Callable[[], T]) -> T:
        kept = self._parts.get(name)
        if kept is None or kept[0] != state:
            kept = self._parts[name] = (state, make())
        return cast("T", kept[1])  # a name has one type


def _state(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns


def _entries(folder: str | Path) -> Iterator[tuple[str, Hashable]]:
    """Yield (path, state) of each file and folder in a folder, sorted; none where there is no folder.

    The state changes with the entry.
    """
    try:
        paths = sorted(entry.path for entry in os.scandir(folder))
    except OSError:
        return
    yield from ((path, _state(Path(path))) for path in paths)


def _below(folder: str | Path, depth: int = 2) -> Iterator[tuple[str, Hashable]]:
    """Yield (path, state) of each file and folder below a folder, down to `depth` levels; the state changes with it."""
    for path, state in _entries(folder):
        yield path, state
        if depth > 1 and os.path.isdir(path):
            yield from _below(path, depth - 1)

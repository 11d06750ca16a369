"""Numbers of a run by step: metrics.jsonl, and the run's trackers. Rank 0 writes them.

{"step": 120, "loss": 0.0312, "learning_rate": 0.0001, "step_s": 0.412}
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.files.output_file import write_atomically

if TYPE_CHECKING:
    from diffusionpipe.trainer.reporting.tracker import LoggedImage
    from diffusionpipe.trainer.reporting.trackers import Trackers

METRICS = "metrics.jsonl"
_STEP = re.compile(r'^{"step": (\d{1,18}),', re.MULTILINE)
_END = 65536
"""The number of bytes at the end of metrics.jsonl in which the last step is looked for."""


class MetricsWriter:
    """Appends a line to metrics.jsonl for each call of `write`, and hands the same numbers to the trackers.

    Resuming after step k drops the lines of later steps, which the resumed run writes again; a line that a crash cut
    off goes too. Numbers that are not finite become null, because JSON has no other word for them.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, trackers: "Trackers | None" = None) -> None:
        """Open the file metrics.jsonl in the run folder.

        `resume_step` is the last step that the resumed run has done; None begins a new file.
        """
        from diffusionpipe.trainer.reporting.trackers import Trackers  # reports read metrics without torch

        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        _truncate(self._path, resume_step)
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._trackers = trackers or Trackers()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line of a step's values and records them in the trackers.

        The line is in the file when this returns.
        """
        finite = {name: value if isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        self._trackers.scalars(step, values)

    def show(self, step: int, shown: "Sequence[LoggedImage]") -> None:
        """Records the pictures that were drawn after a step in the trackers."""
        self._trackers.pictures(step, shown)

    def close(self) -> None:
        """Closes the file and the trackers."""
        self._file.close()
        self._trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The values of all complete lines of a run's metrics.jsonl, in order; [] if there is no such file.

    Raises:
        ConfigError: it cannot be read, or is not a regular file.
    """
    path = folder / METRICS
    _refuse_stranger(path)
    return [row for _, row in _lines(path)] if path.exists() else []


def last_step(folder: Path) -> int:
    """The highest step in the last 64 KiB of a run's metrics.jsonl; 0 if there is none, or it cannot be read."""
    if problem_of_file(folder / METRICS):
        return 0
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return 0
    return max((int(step) for step in _STEP.findall(text)), default=0)


def _lines(path: Path) -> list[tuple[str, dict[str, float | None]]]:
    """(text, values) of each complete line of a metrics.jsonl.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; remove it") from error
    lines = (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [(line, row) for line in lines if (row := row_of(line)) is not None]


def row_of(line: str | bytes) -> dict[str, float | None] | None:
    """The values of a line of metrics.jsonl; None where a crash cut it off, or another program wrote it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _refuse_stranger(path: Path) -> None:
    """Raise a ConfigError where the path is not a regular file: reading a FIFO never ends, a broken link has none."""
    if problem := problem_of_file(path):
        raise ConfigError(f"{path}: {problem}; remove it")


def _truncate(path: Path, last_step: int | None) -> None:
    """Remove the lines of steps after `last_step` from a metrics.jsonl, atomically; None removes all lines."""
    _refuse_stranger(path)
    if not path.exists():
        return
    kept = [line for line, row in _lines(path) if last_step is not None and (row["step"] or 0) <= last_step]
    write_atomically(path, "".join(kept))

"""The memory that each rank uses by step: memory/rank_0.jsonl, ... in the run folder. Each rank writes its own.

{"step": 120, "memory_allocated_gib": 9.51, "host_memory_gib": 3.2}

A line is written only where the step is 2 % further or a number has changed by 1 %, so a file of 100,000 steps in which
nothing changes has some 500 lines. A resumed run appends; of two lines of a step the later one counts.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diffusionpipe.files.output_file import reason_of

FOLDER = "memory"
_FURTHER, _CHANGED = 1.02, 0.01


def memory_file(folder: Path, rank: int) -> Path:
    """The path of a rank's file of memory use in a run folder: memory/rank_N.jsonl."""
    return folder / FOLDER / f"rank_{rank}.jsonl"


class RankMemory:
    """Writes the memory that a rank uses by step into the rank's file; an error of the disk ends only the writing."""

    def __init__(self, folder: Path, rank: int, *, is_new: bool) -> None:
        """Starts the record; the file is made with the first line.

        `is_new`: whether the run begins at its first step, so that the file of an earlier run is removed.
        """
        self._path = memory_file(folder, rank)
        if is_new:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._step, self._memory = 0, dict[str, float]()
        self.problem = ""
        """The reason why the file cannot be written; "" where it can. The run continues without it."""

    def note(self, step: int, memory: Mapping[str, float]) -> None:
        """Appends the memory in use after a step, if the step is 2 % further or a number has changed by 1 %."""
        if self.problem or not memory or not self._is_news(step, memory):
            return
        self._step, self._memory = step, dict(memory)
        line = json.dumps({"step": step, **{name: round(value, 4) for name, value in memory.items()}})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self.problem = reason_of(error)

    def _is_news(self, step: int, memory: Mapping[str, float]) -> bool:
        if step >= self._step * _FURTHER or memory.keys() != self._memory.keys():
            return True
        return any(
            abs(value - self._memory[name]) > _CHANGED * abs(self._memory[name]) for name, value in memory.items()
        )


def read_memory(folder: Path) -> dict[int, list[dict[str, float]]]:
    """Rank -> the lines that it has written about its memory, in the order of steps, from the files in a run folder.

    Each line has "step" and numbers in GiB by name. {} where no rank has written any.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for path in sorted((folder / FOLDER).glob("rank_*.jsonl")):
        number = path.stem.removeprefix("rank_")
        if not (number.isascii() and number.isdigit() and path.is_file()):
            continue
        rows: dict[int, dict[str, float]] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a crash cut it off
            if line.endswith("\n") and isinstance(row, dict) and type(row.get("step")) is int:
                rows[row["step"]] = row
        if rows:
            found[int(number)] = [rows[step] for step in sorted(rows)]
    return found

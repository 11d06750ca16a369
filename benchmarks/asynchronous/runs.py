"""All runs, each written down as soon as it has ended; what is written down already is not trained again."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.asynchronous.digits import Digits, base_of, prepare
from benchmarks.asynchronous.settings import BASE, SETTINGS, Setting, Task
from benchmarks.asynchronous.training import Outcome, train

RUNS = "runs.jsonl"


def outcomes(folder: Path) -> tuple[Outcome, ...]:
    """Those that are written down in a folder, in the order of the settings."""
    path = folder / RUNS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [setting.name for setting in SETTINGS]
    found = {(one.setting, one.seed): one for one in map(_read, lines) if one.setting in names}
    return tuple(sorted(found.values(), key=lambda one: (names.index(one.setting), one.seed)))


def run(folder: Path, settings: Sequence[Setting], seeds: Sequence[int], steps: int) -> Iterator[Outcome]:
    """Train what is missing, seed after seed; several processes may share the folder, each with its own seeds."""
    prepare(folder)
    if any(setting.task is Task.ADAPTERS for setting in settings) and not base_of(folder).is_dir():
        train(Digits(folder, 0, Task.BASE), BASE, steps, keep=base_of(folder))
    for seed in seeds:
        done = {one.setting for one in outcomes(folder) if one.seed == seed}
        digits = {task: Digits(folder, seed, task) for task in Task}
        for setting in settings:
            if setting.name not in done:
                outcome = train(digits[setting.task], setting, steps)
                with (folder / RUNS).open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(outcome)) + "\n")
                yield outcome


def _read(line: str) -> Outcome:
    row = json.loads(line)
    curve = tuple((step, loss) for step, loss in row.pop("curve"))
    return Outcome(ages=tuple(row.pop("ages")), curve=curve, **row)

"""Opens exports in environments of earlier versions, and draws there as here: `make old-readers`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from old_readers.exports import SOURCES, Source, arrays_of, export, write_data, write_source

READER = Path(__file__).parents[1] / "kit/plain_reader.py"
STEPS = 3
CLOSE = 1e-4
"""The largest difference of values in [0, 1]."""
LEARNT = 1e-3
"""The least that one step of training changes pictures by: else they would not show what was read."""
ABSENT = ("has no attribute", "cannot import name")
"""What an error says where a library has no such class yet."""
Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with a version of diffusers and of transformers."""

    python: Path

    @property
    def versions(self) -> str:
        """The versions that are opened with."""
        words = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"
        names = ("diffusers", "transformers", "peft")
        found = subprocess.run([self.python, "-c", words % (names,)], capture_output=True, text=True, check=True)
        return found.stdout.strip()

    def results(self, jobs: Sequence[Job], place: Path) -> list[Job]:
        """Does all jobs in a process of this environment; its pictures have its number in their names."""
        place.mkdir(parents=True, exist_ok=True)
        numbered = [job | {"picture": str(place / f"{number}.npy")} for number, job in enumerate(jobs)]
        asked, found = place / "jobs.json", place / "results.json"
        asked.write_text(json.dumps(numbered), encoding="utf-8")
        with (place / "output.txt").open("w") as output:
            subprocess.run([self.python, READER, asked, found], stdout=output, stderr=output, check=True)
        results = json.loads(found.read_text(encoding="utf-8"))
        return [result | {"picture": job["picture"]} for job, result in zip(numbered, results, strict=True)]


def main() -> int:
    """Prints a table; the status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="+", type=Path, help="folders of virtual environments")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--keep", type=Path, help="a folder in which everything stays")
    arguments = parser.parse_args()
    sources = [source for name, source in SOURCES.items() if arguments.only.lower() in name.lower()]
    others = [Environment(folder.absolute() / "bin" / "python") for folder in arguments.environments]
    with TemporaryDirectory() as temporary:
        place = (arguments.keep or Path(temporary)).resolve()
        rows = _rows(sources, (Environment(Path(sys.executable)), *others), place)
    print(f"Here: {Environment(Path(sys.executable)).versions}")
    print("\n".join(table(rows, [other.versions for other in others])))
    return int(any("FAILED" in cell for row in rows.values() for cell in row))


def _rows(sources: Sequence[Source], environments: Sequence[Environment], place: Path) -> Mapping[str, Sequence[str]]:
    """What became of each model in each environment but the first, which is the one to compare with."""
    jobs: list[Job] = []
    for source in sources:
        jobs += _jobs(source, place / source.name.replace(" ", "-"))
        print(f"{source.name} is trained and exported", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(2) as pool:
        places = [place / f"environment-{number}" for number in range(len(environments))]
        here, *there = pool.map(lambda pair: pair[0].results(jobs, pair[1]), zip(environments, places, strict=True))
    rows: dict[str, list[str]] = {}
    for source in sources:
        mine = [number for number, job in enumerate(jobs) if job["model"] == source.name]
        names = ["source", *source.ways]
        rows[source.name] = [
            cell(names, [here[number] for number in mine], [results[number] for number in mine]) for results in there
        ]
    return rows


def _jobs(source: Source, place: Path) -> list[Job]:
    """One for the source folder and one for each way to export."""
    model, data = write_source(source, place / "model"), write_data(source, place / "data")
    folders: dict[str, tuple[Path, Path | None]] = {"source": (model, None)}
    for way in source.ways:
        exported = export(source, way, model, data, place / way)
        folders[way] = (model, exported) if way == "adapters" else (exported, None)
    return [
        {
            "model": source.name,
            "folder": str(folder),
            "adapters": None if adapters is None else str(adapters),
            "call": dict(source.call) | {"num_inference_steps": STEPS},
            "arrays": arrays_of(source, place),
            "eager": source.eager,
            "seed": 0,
        }
        for folder, adapters in folders.values()
    ]


def cell(names: Sequence[str], here: Sequence[Job], there: Sequence[Job]) -> str:
    """The largest difference of pictures; why there is none; or what failed, which is printed, too."""
    errors = [result["error"] for result in there]
    absent = [error for error in errors if error and any(word in error for word in ABSENT)]
    if len(absent) == len(errors):
        return f"none: {absent[0].partition(': ')[2]}"
    problems = []
    for name, now, then in zip(names, here, there, strict=True):
        problems += [f"{name}: {problem}" for problem in _problems(now, then)]
    if not problems:
        first, *others = (np.load(result["picture"]) for result in there)
        learnt = [float(np.abs(other - first).max()) for other in others]
        pairs = zip(names[1:], learnt, strict=True)
        problems = [f"{name}: pictures are those of the source" for name, change in pairs if change < LEARNT]
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    if problems:
        return f"FAILED: {problems[0]}"
    return f"{max(_difference(now, then) for now, then in zip(here, there, strict=True)):.0e}"


def _problems(here: Job, there: Job) -> list[str]:
    """What is wrong with one export."""
    errors = [result["error"] for result in (here, there) if result["error"]]
    if errors or there["reports"] or here["reports"]:
        return [*errors, *there["reports"], *here["reports"]]
    if _difference(here, there) > CLOSE:
        return [f"pictures differ by {_difference(here, there):.1e}"]
    return []


def _difference(here: Job, there: Job) -> float:
    ours, theirs = np.load(here["picture"]), np.load(there["picture"])
    return float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape and np.isfinite(ours).all() else np.inf


def table(rows: Mapping[str, Sequence[str]], heads: Sequence[str]) -> list[str]:
    """A row for each model, a column for each environment."""
    lines = [f"| model | exported | {' | '.join(heads)} |", f"|---|---{'|---' * len(heads)}|"]
    return lines + [f"| {name} | {', '.join(SOURCES[name].ways)} | {' | '.join(row)} |" for name, row in rows.items()]


if __name__ == "__main__":
    sys.exit(main())

"""`make torture`: jobs that are killed, stopped and starved at every moment of their life, and a table of what came."""

import argparse
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kit.crew import start_fork_server
from kit.signals import hear_all_signals
from torture import disks, folders, frozen, kills, real, restarts, stops
from torture.cases import Case, Scene
from torture.findings import COLUMNS, column_of
from torture.inputs import Inputs
from torture.mounts import NotAllowedError
from transformers.utils.logging import disable_progress_bar

SHOWN = 3000
"""Characters of a failure that are printed."""
NOT_ALLOWED = "not allowed here"
RESULTS = ("ok", *COLUMNS.values(), "other", NOT_ALLOWED)


@dataclass
class Report:
    """What has happened so far."""

    total: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, result: str, told: str, seconds: float) -> None:
        """Count a case and print its line."""
        self.counts.setdefault(case.kind, Counter())[result] += 1
        self.kills[case.kind] += case.kills if result != NOT_ALLOWED else 0
        done = sum(counts.total() for counts in self.counts.values())
        first = told.splitlines()[0] if told else ""
        print(f"{done:3} of {self.total}  {case.kind:13} {case.what}: {result}, {first} [{seconds:.0f} s]", flush=True)
        if result not in ("ok", NOT_ALLOWED):
            self.failures.append(f"{case.kind}, {case.what}: {result}\n{told[-SHOWN:]}")
            print(told[-SHOWN:], flush=True)

    def table(self) -> str:
        """Cases by kind and result."""
        rows = [("what", "cases", "kills", *RESULTS)]
        for kind, counts in self.counts.items():
            rows.append((kind, str(counts.total()), str(self.kills[kind]), *(str(counts[name]) for name in RESULTS)))
        whole: Counter[str] = sum(self.counts.values(), Counter())
        rows.append(("all", str(whole.total()), str(self.kills.total()), *(str(whole[name]) for name in RESULTS)))
        widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
        return "\n".join(
            row[0].ljust(widths[0])
            + "".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        )


def all_cases() -> list[Case]:
    """Every case, in the order of a job's life."""
    modules = (kills, real, stops, frozen, restarts, folders, disks)
    return [case for module in modules for case in module.cases()]


def run(cases: Sequence[Case], *, seed: int, folder: Path, keeps: bool = True) -> Report:
    """Run cases one after the other; `keeps`: leave their folders there."""
    inputs, report = Inputs(folder), Report(len(cases))
    for number, case in enumerate(cases):
        started = time.monotonic()
        scene = Scene(inputs, Random(f"{seed} {case.kind} {case.what}"), f"run-{number}")
        result, told = _outcome(case, scene)
        report.add(case, result, told, time.monotonic() - started)
        for path in [] if keeps else folder.glob(f"{scene.name}*"):
            if path.name.partition(".")[0] == scene.name:
                shutil.rmtree(path)
    return report


def _outcome(case: Case, scene: Scene) -> tuple[str, str]:
    try:
        return "ok", case.act(scene)
    except NotAllowedError as error:
        return NOT_ALLOWED, str(error)
    except AssertionError as error:
        return column_of(error), str(error) or traceback.format_exc()
    except Exception:
        return "other", traceback.format_exc()


def chosen(cases: Sequence[Case], only: Sequence[str], first: int, limit: int | None) -> list[Case]:
    """Those with one of the words in their kind or description; with no word all."""
    found = [case for case in cases if not only or any(word in f"{case.kind}, {case.what}" for word in only)]
    return found[first : None if limit is None else first + limit]


def main() -> int:
    """The exit status: 1 if a case has failed."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another one kills at other random moments")
    parser.add_argument("--only", action="append", default=[], help="cases with this word, also several times")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--limit", type=int, help="and take so many")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, which stay there")
    options = parser.parse_args()
    cases = chosen(all_cases(), options.only, options.first, options.limit)
    if options.list or not cases:
        print("\n".join(f"{case.kind:13} {case.what}" for case in cases) or "no such case")
        return 0 if cases else 2
    disable_progress_bar()
    hear_all_signals()
    start_fork_server("torture.warm")
    started = time.monotonic()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        report = run(cases, seed=options.seed, folder=options.keep)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            report = run(cases, seed=options.seed, folder=Path(temporary), keeps=False)
    print(f"\n{report.table()}")
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s")
    return 1 if report.failures else 0

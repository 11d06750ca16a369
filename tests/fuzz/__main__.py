"""`make fuzz`: mutated inputs of every kind, each read in a process of its own, and a table of how they ended."""

import argparse
import importlib
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random

from fuzz.isolation import Ending, Outcome, all_outcomes
from fuzz.kinds import KINDS
from fuzz.originals import Case, Kind, Originals, make_originals
from kit.crew import IMPORTED

from diffusionpipe import cli, planner, viz
from diffusionpipe.cli.verbs.output import quieten

SHOWN = 1600
"""Characters of a failure that are printed."""


@dataclass
class Report:
    """What has happened so far."""

    endings: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int, case: Case, outcome: Outcome) -> None:
        """Count an outcome and describe it if it is a failure."""
        ending = str(outcome.ending)
        if outcome.ending is Ending.REFUSED and not _is_named(case, outcome.text):
            ending = "unnamed"
        self.endings.setdefault(kind, Counter())[ending] += 1
        if ending not in (Ending.ACCEPTED, Ending.REFUSED):
            self.failures.append(f"{kind}, case {number}: {ending}\n{outcome.text[-SHOWN:].strip()}\n")
            print(self.failures[-1], flush=True)

    def table(self) -> str:
        """Cases by kind and ending."""
        columns = ("refused", "accepted", "traceback", "hang", "memory", "unnamed")
        rows = [("input", "cases", *columns)]
        total: Counter[str] = Counter()
        for kind, counts in self.endings.items():
            rows.append((kind, str(counts.total()), *(str(counts[column]) for column in columns)))
            total += counts
        rows.append(("all", str(total.total()), *(str(total[column]) for column in columns)))
        return "\n".join(f"{row[0]:16}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


def _is_named(case: Case, text: str) -> bool:
    return "Traceback" not in text and bool(text.strip()) and (
        not case.names or any(name in text for name in case.names)
    )  # fmt: skip


def counts_of(total: int | None, only: str | None) -> dict[str, int]:
    """Cases of each kind, `total` in all and in the same proportions; None: as many as are listed."""
    listed = {kind: count for kind, (_, count) in KINDS.items() if only is None or only in kind}
    everything = sum(listed.values())
    return {kind: count if total is None else max(1, total * count // everything) for kind, count in listed.items()}


def cases_of(
    counts: Mapping[str, int],
    seed: int,
    originals: Originals,
    folder: Path,
    kinds: Mapping[str, tuple[Kind, int]] = KINDS,
) -> Iterator[tuple[str, int, Case]]:
    """(kind, number, case) of all kinds by turns. A case follows from seed, kind and number alone."""
    rows = [[(kind, number) for number in range(count)] for kind, count in counts.items()]
    for kind, number in (one for row in zip_longest(*rows) for one in row if one is not None):
        place = folder / f"{kind.replace(', ', '-').replace(' ', '-')}-{number}"
        yield kind, number, kinds[kind][0](originals, Random(f"{seed} {kind} {number}"), place)


def run(
    counts: Mapping[str, int],
    *,
    seed: int,
    processes: int,
    folder: Path,
    first: int = 0,
    kinds: Mapping[str, tuple[Kind, int]] = KINDS,
) -> Report:
    """Run the cases; of each kind those from number `first` on."""
    _import_all()
    originals, report = make_originals(folder / "originals"), Report()
    places: dict[int, tuple[str, int, Case]] = {}

    def acts() -> Iterator[tuple[int, Callable[[], object]]]:
        cases = cases_of(counts, seed, originals, folder / "cases", kinds)
        for index, (kind, number, case) in enumerate(cases):
            if number >= first:
                places[index] = kind, number, case
                yield index, case.act

    for index, outcome in all_outcomes(acts(), folder / "said", processes):
        kind, number, case = places.pop(index)
        report.add(kind, number, case, outcome)
        shutil.rmtree(folder / "said" / f"case-{index}", ignore_errors=True)
        shutil.rmtree(folder / "cases" / f"{kind.replace(', ', '-').replace(' ', '-')}-{number}", ignore_errors=True)
        if sys.stderr.isatty():
            print(f"\r{index + 1} cases", end="", file=sys.stderr)
    return report


def _import_all() -> None:
    """Import what the cases use, so that their processes start with it, and be as quiet as the command line."""
    quieten()
    for package in (cli, planner, viz):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for name in (*IMPORTED, "scipy.optimize", "matplotlib.figure"):
        importlib.import_module(name)


def main() -> int:
    """The exit status: 1 if a case has failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another one makes other cases")
    parser.add_argument("--cases", type=int, help="fewer or more than the listed 2,500")
    parser.add_argument("--only", help="kinds of inputs with this word in their names")
    parser.add_argument("--first", type=int, default=0, help="of each kind, leave out the cases before this number")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="write the input of one case there: --only KIND --first NUMBER")
    options = parser.parse_args()
    counts = counts_of(options.cases, options.only)
    if not counts:
        parser.error(f"no kind has {options.only!r} in its name; there are {', '.join(KINDS)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        if options.keep is not None:
            return _keep(counts, options.seed, options.first, Path(temporary), options.keep)
        report = run(
            counts, seed=options.seed, processes=options.processes, folder=Path(temporary), first=options.first
        )
    print(report.table())
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s")
    return 1 if report.failures else 0


def _keep(counts: Mapping[str, int], seed: int, number: int, folder: Path, target: Path) -> int:
    originals = make_originals(folder / "originals")
    for kind, at, case in cases_of(dict.fromkeys(counts, number + 1), seed, originals, folder / "cases"):
        if at == number:
            shutil.copytree(folder / "cases", target, dirs_exist_ok=True)
            print(f"{kind}, case {at}: {target}")
            with suppress(SystemExit):
                case.act()
    return 0


if __name__ == "__main__":
    sys.exit(main())

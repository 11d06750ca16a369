"""Trains tiny models of every family, whole and with adapters, in every layout: `make families`."""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from crew import crew_of
from cuts import traced_once
from family_runs import CASES, LAYOUTS, SAVED, WITHOUT_ADAPTERS, Case, Families, check


def main() -> int:
    """Prints a table; the status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families whose names contain this")
    only = parser.parse_args().only.lower()
    torch.set_num_threads(1)
    found: dict[Case, str] = {}
    with TemporaryDirectory() as place, crew_of(2) as crew, traced_once():
        families = Families(Path(place))
        for number, case in enumerate(CASES):
            if only not in case.kind.lower():
                continue
            started = perf_counter()
            try:
                check(families, crew, case, Path(place) / "runs" / str(number))
                found[case] = f"{perf_counter() - started:.1f} s"
            except Exception as error:
                found[case] = "FAILED"
                print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"{case.name} {found[case]}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    return int("FAILED" in found.values())


def table(found: dict[Case, str]) -> list[str]:
    """A row for each family, a column for each layout, whole and with adapters."""
    heads = [f"{layout}, {way}" for layout in LAYOUTS for way in ("whole", "adapters")]
    lines = [f"| pipeline | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for kind in SAVED:
        cells = [
            "none" if way and kind in WITHOUT_ADAPTERS else found.get(_case(kind, layout, way), "")
            for layout in LAYOUTS
            for way in (False, True)
        ]
        if any(cells):
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def _case(kind: str, layout: str, is_adapted: bool) -> Case:
    return Case(kind=kind, layout=layout, is_adapted=is_adapted)


if __name__ == "__main__":
    sys.exit(main())

"""Trains tiny models of every family, whole and with adapters, in every layout: `make families`."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from family_runs import LAYOUTS, SAVED, WITHOUT_ADAPTERS, Case, Place, all_of, check, train_all


def main() -> int:
    """Prints a table; the status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families whose names contain this")
    only = parser.parse_args().only.lower()
    found: dict[Case, str] = {}
    for kind in SAVED:
        if only in kind.lower():
            found |= _outcomes(kind)
    print("\n".join(table(found)))
    return int("FAILED" in found.values())


def _outcomes(kind: str) -> dict[Case, str]:
    """The seconds of each case of a family, or that it failed."""
    found: dict[Case, str] = {}
    with TemporaryDirectory() as folder:
        place = Place(Path(folder), kind)
        for case, result in train_all(place, all_of(kind)).items():
            try:
                if isinstance(result, Exception):
                    raise result
                check(place, case)
                found[case] = f"{result:.1f} s"
            except Exception as error:
                found[case] = "FAILED"
                print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"{case.name} {found[case]}", file=sys.stderr, flush=True)
    return found


def table(found: Mapping[Case, str]) -> list[str]:
    """A row for each family, a column for each layout, whole and with adapters."""
    heads = [f"{layout}, {way}" for layout in LAYOUTS for way in ("whole", "adapters")]
    lines = [f"| pipeline | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for kind in dict.fromkeys(case.kind for case in found):
        cells = [
            "none" if way and kind in WITHOUT_ADAPTERS else found[Case(kind=kind, layout=layout, is_adapted=way)]
            for layout in LAYOUTS
            for way in (False, True)
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())

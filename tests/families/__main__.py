"""Trains tiny models of every family, whole and with adapters, in every layout, and draws: `make families`.

The last table has steps of several sizes over photographs.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from families.sizes import main_of_sizes
from kit.drawn_families import Drawn, difference
from kit.drawn_families import check as check_drawn
from kit.drawn_from_words import SAVED as CALLED
from kit.drawn_from_words import WITHOUT, calls_of, compared, drawn_apart, lacks_of
from kit.family_runs import LAYOUTS, SAVED, Place, all_of, check, run_all

Row = dict[str, str]
"""What became of a family, by the heads of the table."""

LAYOUT_HEADS = {(layout, way): f"{layout}, {way}" for layout in LAYOUTS for way in ("whole", "adapters")}
DRAWN = "drawn on 1, 2 and 3 ranks"
WORDS = "from words, by diffusers in another process"
BUSY = "busy, 8 pictures on 2 ranks"
"""Without guidance, with forwards of 20 ms; on a busy machine it is less, so it is not checked."""


def main() -> int:
    """Prints a table; the status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help='families whose names contain this, or "sizes"')
    only = parser.parse_args().only.lower()
    kinds = [kind for kind in dict.fromkeys((*SAVED, *CALLED)) if only in kind.lower()]
    found = {kind: _row(kind) for kind in kinds}
    if found:
        print("\n".join(table(found)))
    for kind, reason in WITHOUT.items():
        print(f"{kind} is not called with words: {reason}")
    for kind in kinds:
        if lacks := lacks_of(kind):
            print(f"{kind} of diffusers lacks {' and '.join(lacks)}")
    has_equal_sizes = main_of_sizes(only)
    return int(not has_equal_sizes or any("FAILED" in row.values() for row in found.values()))


def _row(kind: str) -> Row:
    """The seconds of each training, and the largest difference of pictures; or that it failed."""
    row: Row = dict.fromkeys((*LAYOUT_HEADS.values(), DRAWN, BUSY), "none")
    with TemporaryDirectory() as folder:
        row[WORDS] = _from_words(kind, Path(folder) / "words")
        if kind not in SAVED:
            return row
        place = Place(Path(folder), kind)
        outcome = run_all(place, all_of(kind), is_timed=True)
        for case, result in outcome.trained.items():
            head = LAYOUT_HEADS[case.layout, "adapters" if case.is_adapted else "whole"]
            row[head] = _cell(case.name, result, partial(check, place, case), lambda seconds: f"{seconds:.1f} s")
        row[DRAWN] = _cell(f"{kind}-drawn", outcome.drawn, partial(_check_all, outcome.drawn), _largest)
        row[BUSY] = _cell(f"{kind}-busy", outcome.busy, lambda: None, lambda busy: f"{busy:.0%}")  # is no check
    return row


def _from_words(kind: str, place: Path) -> str:
    """Every call of diffusers' pipeline, and ours."""
    found: dict[str, float] = {}

    def compare() -> None:
        told = calls_of(kind, CALLED[kind](place / "model"))
        found.update(compared(told, drawn_apart(told, place / "apart")))

    cell = _cell(
        f"{kind}-words",
        None,
        compare,
        lambda _: f"{max(found.values()):.0e} ({len(found)} calls)",
    )
    for call, differs in found.items():
        print(f"{kind}-words {call}: {differs:.0e}", file=sys.stderr)
    return cell


def _cell(name: str, result: Any, check_it: Callable[[], None], words: Callable[[Any], str]) -> str:
    try:
        if isinstance(result, Exception):
            raise result
        check_it()
        cell = words(result)
    except Exception as error:
        cell = "FAILED"
        print(f"{name}: {type(error).__name__}: {error}", *getattr(error, "__notes__", ()), file=sys.stderr)
    print(f"{name} {cell}", file=sys.stderr, flush=True)
    return cell


def _check_all(drawn: Sequence[Drawn]) -> None:
    for one in drawn:
        check_drawn(one)


def _largest(drawn: Sequence[Drawn]) -> str:
    """How far the pictures are from diffusers'."""
    return f"{max(difference(ranks, (one.reference,)) for one in drawn for ranks in one.ranks):.0e}"


def table(found: Mapping[str, Row]) -> list[str]:
    """A row for each family."""
    heads = [*LAYOUT_HEADS.values(), DRAWN, WORDS, BUSY]
    lines = [f"| pipeline | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    return lines + [f"| {kind} | {' | '.join(row[head] for head in heads)} |" for kind, row in found.items()]


if __name__ == "__main__":
    sys.exit(main())

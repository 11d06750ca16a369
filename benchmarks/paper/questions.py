"""Where filling pays: `python -m benchmarks.paper.questions [--only NAME] [--png FOLDER]`.

Filled pipelines beside filled data parallelism by memory and by batch, what filling alone gives, and what is left of
the paper's claims. `benchmarks.paper.sensitivity` has the links between nodes.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from benchmarks.paper import claims, contests, gains

WIDTH = 230


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.questions", description=__doc__)
    parser.add_argument("--only", choices=tuple(QUESTIONS), help="one question")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also draw a picture of each question")
    arguments = parser.parse_args()
    console = Console(width=WIDTH, highlight=False)
    for name, answer in QUESTIONS.items():
        if arguments.only in {None, name}:
            answer(console, arguments.png / f"{name}.png" if arguments.png else None)


def _memory(console: Console, path: Path | None) -> None:
    found, varied = list(contests.by_memory()), "GiB of a device"
    title = "SDXL, 8 devices, 8 samples each: filled pipeline over filled data parallelism, simulated"
    console.print(contests.table_of(found, title, varied))
    if path:
        contests.draw(found, path, title, varied)


def _batch(console: Console, path: Path | None) -> None:
    found, varied = list(contests.by_batch()), "samples on each device"
    title = "SD 2.1: filled pipeline over filled data parallelism, simulated"
    console.print(contests.table_of(found, title, varied))
    if path:
        contests.draw(found, path, title, varied)


def _filling(console: Console, path: Path | None) -> None:
    found = list(gains.gains())
    console.print(gains.table_of(found))
    if path:
        gains.draw(found, path)


def _claims(console: Console, path: Path | None) -> None:
    found = list(claims.claims())
    console.print(claims.table_of(found))
    if path:
        claims.draw(found, path)


QUESTIONS: Mapping[str, Callable[[Console, Path | None], None]] = {
    "memory": _memory,
    "batch": _batch,
    "filling": _filling,
    "claims": _claims,
}
"""Each with its table and its picture."""


if __name__ == "__main__":
    main()

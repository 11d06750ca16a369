"""What training without a flush learns, how fast it is, and what `plan` shows of it.

`python -m benchmarks.asynchronous [learning|rehearsal|plans] [--json] [--quick] [--keep FOLDER]`.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from benchmarks.asynchronous import plans, rehearsal, rehearsal_table
from benchmarks.asynchronous.runs import outcomes, run
from benchmarks.asynchronous.settings import SETTINGS
from benchmarks.asynchronous.summary import tables_of
from benchmarks.machine import machine
from diffusionpipe.models.opening.configured import configured_models

STEPS, SEEDS = 400, (0, 1, 2)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        {"learning": _learn, "rehearsal": _rehearse, "plans": _plan}[arguments.part](arguments, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("learning", "rehearsal", "plans"), default="learning")
    parser.add_argument("--json", action="store_true", help="print everything instead of a table")
    parser.add_argument("--quick", action="store_true", help="the first settings, sizes or models, shortly")
    parser.add_argument("--keep", type=Path, help="write runs and plans here, and do not repeat those that are here")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the runs (%(default)s)")
    parser.add_argument("--only", default="*", help='settings to train or models to plan, such as "delayed*"')
    parser.add_argument("--show", action="store_true", help="make nothing: only show what --keep holds")
    parser.add_argument(
        "--sizes", type=_pair, nargs="+", default=rehearsal.SIZES, help="rehearsed: ranks,micro-batches"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of a rehearsal (%(default)s)")
    return parser


def _pair(text: str) -> tuple[int, int]:
    ranks, microbatches = map(int, text.split(","))
    return ranks, microbatches


def _learn(arguments: argparse.Namespace, folder: Path) -> None:
    steps, seeds = (60, arguments.seeds[:1]) if arguments.quick else (STEPS, arguments.seeds)
    settings = [setting for setting in SETTINGS if fnmatchcase(setting.name, arguments.only)]
    if not arguments.show:
        for one in run(folder, settings[:3] if arguments.quick else settings, seeds, steps):
            made = f"{one.setting}, seed {one.seed}: loss {one.loss:.4f}, {one.recognised:.0%} recognised"
            Console(stderr=True, highlight=False).print(f"{made}, {one.processor:.0f} s of processor time")
    found = outcomes(folder)
    if arguments.json:
        print(json.dumps({"machine": machine(), "runs": [asdict(one) for one in found]}, indent=2))
    else:
        Console(highlight=False, width=140).print(*tables_of(found, steps), machine())


def _rehearse(arguments: argparse.Namespace, folder: Path) -> None:
    sizes, rounds = (arguments.sizes[:1], 1) if arguments.quick else (arguments.sizes, arguments.rounds)
    found = [rehearsal.measure(ranks, microbatches, rounds) for ranks, microbatches in sizes]
    if arguments.json:
        print(json.dumps({"machine": machine(), "rehearsals": [asdict(one) for one in found]}, indent=2))
    else:
        Console(highlight=False, width=140).print(rehearsal_table.table_of(found), machine())


def _plan(arguments: argparse.Namespace, folder: Path) -> None:
    models = [model for model in configured_models() if fnmatchcase(model, arguments.only)]
    if not arguments.show:
        for cell in plans.plan(folder, models[:1] if arguments.quick else models):
            made = f"{cell.model} on {cell.cluster}: {cell.rows} rows, {cell.least_ratio:.3f} of all work"
            Console(stderr=True, highlight=False).print(made)
    cells = plans.kept(folder)
    if arguments.json:
        print(json.dumps([asdict(cell) for cell in cells], indent=2))
    else:
        Console(highlight=False, width=160).print(plans.table_of(cells))


if __name__ == "__main__":
    main()

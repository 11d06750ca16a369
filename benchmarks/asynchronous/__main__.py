"""What training without a flush learns: `python -m benchmarks.asynchronous [--json] [--quick] [--keep FOLDER]`."""

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

from benchmarks.asynchronous.runs import outcomes, run
from benchmarks.asynchronous.settings import SETTINGS
from benchmarks.asynchronous.summary import table_of
from benchmarks.machine import machine

STEPS, SEEDS = 400, (0, 1, 2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print every run instead of a table")
    parser.add_argument("--quick", action="store_true", help="the first three settings, one seed, 60 steps")
    parser.add_argument("--keep", type=Path, help="write the runs here, and do not repeat those that are here")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the runs (%(default)s)")
    parser.add_argument("--only", default="*", help='settings to train, such as "delayed*"')
    parser.add_argument("--show", action="store_true", help="train nothing: only show what --keep holds")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console, steps = Console(highlight=False, width=140), 60 if arguments.quick else STEPS
    settings = [setting for setting in SETTINGS if fnmatchcase(setting.name, arguments.only)]
    if arguments.quick:
        settings, arguments.seeds = settings[:3], arguments.seeds[:1]
    with TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        if not arguments.show:
            folder.mkdir(parents=True, exist_ok=True)
            for one in run(folder, settings, arguments.seeds, steps):
                made = f"{one.setting}, seed {one.seed}: loss {one.loss:.4f}, {one.recognised:.0%} recognised"
                Console(stderr=True, highlight=False).print(f"{made}, {one.processor:.0f} s of processor time")
        found = outcomes(folder)
    if arguments.json:
        print(json.dumps({"machine": machine(), "runs": [asdict(one) for one in found]}, indent=2))
    else:
        console.print(table_of(found, steps), machine())


if __name__ == "__main__":
    main()

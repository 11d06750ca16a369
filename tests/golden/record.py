"""Records anew what tests/golden and tests/files compare with; README.md says when that is right.

    cd tests
    PYTHONPATH=TREE/src:TREE OMP_NUM_THREADS=1 python -m golden.record [orders] [families] [losses] [files]

TREE is a checkout of the version to record: its source, benchmarks and profiles are used, and no file of this one but
those in tests/golden, tests/kit/crew.py and tests/kit/tiny_runs.py. Every recording is made as the tests repeat it.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from dataclasses import asdict, replace
from functools import partial
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from golden.folders import KINDS, save_model, save_pictures
from golden.losses import machine
from golden.orders import FAMILIES, family_figures, write_orders
from golden.plans import FOLDER
from golden.recipes import FILLED_PLAN, PRECISIONS, STEPS, TRAININGS, recipe_of
from golden.trainings import run_training
from kit.crew import crew_of
from kit.tiny_runs import losses_of, train_here

from benchmarks.ordering.cases import small_cases
from benchmarks.schedules.__main__ import grid as schedule_grid
from benchmarks.schedules.costs import PART, Cell
from benchmarks.schedules.simulated import LIMITS, run_family
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import write_cluster
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import schedule_to_text
from diffusionpipe.ordering import Goal, Instance, Placing, schedule_of, search
from diffusionpipe.schedules import REGISTRY

FILES = FOLDER.parent / "files"
EVERY = 5
NUM_ORDERS = 60
ORDER_SECONDS = 0.5
"""What the search of one of the 60 instances may take; the benchmark gives it 10."""
CELL_SECONDS = 0.02
"""What benchmarks/schedules gives it."""
MOST_ACTIONS = 16 * 32
"""Families are recorded for at most so many ranks times micro-batches, because larger ones take seconds each."""


def main() -> None:
    parts = {
        "orders": record_orders,
        "families": record_families,
        "losses": record_losses,
        "files": record_files,
    }
    for name in sys.argv[1:] or parts:
        parts[name]()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def record_orders() -> None:
    """60 instances of benchmarks/ordering, every fifth cell of benchmarks/schedules at its limits."""
    asked = [
        (f"ordering-{number:02d} {kind}", replace(instance, seconds=ORDER_SECONDS))
        for number, (kind, instance) in enumerate(small_cases(NUM_ORDERS))
    ]
    for number, cell in _cells():
        asked += [(f"schedules-{number:02d} {limit}", _instance(cell, share)) for limit, share in LIMITS.items()]
    rows = []
    for name, instance in asked:
        try:
            answer = search(instance)
        except ConfigError:
            _say(f"{name}: does not fit")
            continue
        rows.append(
            {
                "name": name,
                "asked": asdict(instance),
                "placement": answer.placement,
                "makespan": answer.makespan,
                "window": answer.window,
                "schedule_file": schedule_to_text(schedule_of(answer)),
            }
        )
    write_orders(rows)
    _say(f"{len(rows)} orders")


def record_families() -> None:
    """The published families in every fifth cell of benchmarks/schedules."""
    rows = [json.dumps(row) for row in _families()]
    FAMILIES.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def _instance(cell: Cell, share: float) -> Instance:
    """As benchmarks/schedules asks."""
    return Instance(
        ranks=cell.ranks,
        microbatches=cell.microbatches,
        placement=Placing.ANY,
        stages=cell.half_stages(),
        comm=cell.comm,
        memory_limit=(cell.limit(share),) * cell.ranks,
        objective=Goal.MAKESPAN,
        seconds=CELL_SECONDS,
    )


def _cells() -> list[tuple[int, Cell]]:
    return list(enumerate(schedule_grid(is_quick=False, is_full=False)))[::EVERY]


def _families() -> Iterator[dict[str, Any]]:
    """Makespan and peak of every family that can do a cell's sizes, in ticks and activations of half-stages."""
    for number, cell in _cells():
        if cell.ranks * cell.microbatches > MOST_ACTIONS:
            continue
        sizes = {"ranks": cell.ranks, "microbatches": cell.microbatches, "halves": list(cell.halves), "comm": cell.comm}
        found = {}
        for name in REGISTRY:
            try:
                found[name] = family_figures(name, **sizes)
            except ConfigError:
                continue
            of_benchmark = run_family(name, cell)
            assert isclose(found[name][0], of_benchmark.makespan * PART, rel_tol=1e-12), name
            assert found[name][1] == of_benchmark.peak * 2, name
        yield {"cell": f"benchmarks/schedules, cell {number}", "sizes": sizes, "makespan_and_peak": found}


def record_losses() -> None:
    """Each training three times: it is recorded only if its losses are the same every time."""
    _write_filled_plan()
    with TemporaryDirectory() as place:
        folder = Path(place)
        digests = {kind: save_model(kind, folder / kind) for kind in KINDS} | {"data": save_pictures(folder / "data")}
        losses: dict[str, dict[str, list[str]]] = {}
        for ranks in sorted({training.ranks for training in TRAININGS.values()}):
            with crew_of(ranks) if ranks > 1 else nullcontext() as crew:
                for name in (name for name, training in TRAININGS.items() if training.ranks == ranks):
                    losses[name] = {}
                    for precision in PRECISIONS:
                        found = [run_training(name, precision, folder, crew) for _ in range(3)]
                        assert found[0] == found[1] == found[2], (name, precision, found)
                        losses[name][precision] = [loss.hex() for loss in found[0]]
                        _say(f"{name}, {precision}: {found[0]}")
    text = json.dumps({"machine": machine(), "digests": digests, "losses": losses}, indent=1)
    (FOLDER / "losses.json").write_text(text + "\n", encoding="utf-8")


def _write_filled_plan() -> None:
    """The plan of "unet-filled", and a plan, profile, cluster and timeline for tests/files, by the command line."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        save_model("unet", folder / "unet")
        save_pictures(folder / "data")
        (folder / "recipe.toml").write_text(FILLED_RECIPE, encoding="utf-8")
        for command in FILLED_COMMANDS:
            subprocess.run([sys.executable, "-m", "diffusionpipe", *command], cwd=folder, check=True)
        shutil.copy(folder / "plan.json", FILLED_PLAN)
        for name in ("plan.json", "plan.timeline.json", "profile.json"):
            shutil.copy(folder / name, FILES / name)
        write_cluster(load_cluster("rtx4090x2"), FILES / "cluster.json")


FILLED_RECIPE = """
[model]
path = "unet"
[data]
train = "data"
resolution = 8
[training]
steps = 5
batch = 8
[pipeline]
plan = "auto"
stages = 2
microbatches = 4
schedule = "1f1b"
fill = true
"""
FILLED_COMMANDS = (
    ("profile", "recipe.toml", "--analytic", "rtx4090", "--batch-sizes", "1,2,4,8"),
    ("plan", "recipe.toml", "--profile", "profile.json", "--cluster", "rtx4090x2", "--out", "plan.json"),
)


def record_files() -> None:
    """A checkpoint after five steps of "dit-alone", and the loss of the sixth, resumed from it."""
    with TemporaryDirectory() as place, chdir(place):
        save_model("dit", Path("dit"))
        save_pictures(Path("data"))
        make = partial(recipe_of, TRAININGS["dit-alone"], model="dit", data="data", folder="run")
        train_here(make("float32"))
        (checkpoint,) = Path("run/checkpoints").iterdir()
        shutil.make_archive(str(FILES / "checkpoint"), "xztar", checkpoint)
        train_here(make("float32", steps=STEPS + 1), str(checkpoint))
        loss = losses_of(Path("run"))[STEPS + 1]
    text = json.dumps({"machine": machine(), "losses": {"float32": [loss.hex()]}}, indent=1)
    (FILES / "sixth_step.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Trainings of the digits of examples/digits in one process."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
ONE_PROCESS = (
    "pipeline.plan=none",
    "pipeline.schedule=none",
    "pipeline.stages=1",
    "pipeline.microbatches=1",
    "pipeline.fill=false",
    "sampling.every=none",
    "checkpoint.every=none",
    "validation.every=25",
    "validation.samples=180",
    "data.workers=0",
)
"""The demo's recipe without a pipeline and pictures; the loss of all held-out digits every 25 steps."""


def data_of(folder: Path) -> Path:
    """The pictures of the digits, which are made in the folder where it lacks them."""
    data = folder / "data"
    if not data.is_dir():
        command = [sys.executable, str(EXAMPLE / "dataset.py"), "--out", str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return data


def trained(folder: Path, steps: int, *overrides: str) -> Path:
    """The folder of a new run of the digits, in `folder`."""
    data = data_of(folder)
    run = folder / f"run-{len(list(folder.iterdir()))}"
    places = (f"data.train={data / 'train'}", f"data.validation={data / 'validation'}", f"run.folder={run}")
    command = [sys.executable, "-m", "diffusionpipe", "train", str(EXAMPLE / "recipe.toml"), "--ranks", "1"]
    subprocess.run(
        [*command, *ONE_PROCESS, *places, f"training.steps={steps}", *overrides], check=True, stdout=subprocess.DEVNULL
    )
    return run


def losses(folder: Path, steps: int, *overrides: str) -> dict[int, float]:
    """Validation losses of a training of the digits, by step; `folder` is kept from one training to the next."""
    run = trained(folder, steps, *overrides)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def reached(found: dict[int, float], loss: float) -> int | None:
    """The first validation at which the loss is as small; None: at none."""
    return next((step for step, value in sorted(found.items()) if value <= loss), None)

"""Trains the digits with and without a recipe, and says after how many steps it has the loss of the run without.

python -m benchmarks.recipes speed            # SpeeD, about eight minutes on one core
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, TimeSampling
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.recipe import load_recipe

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


def losses(folder: Path, steps: int, *overrides: str) -> dict[int, float]:
    """Validation losses of a training of the digits, by step; `folder` is kept from one training to the next."""
    data = folder / "data"
    if not data.is_dir():
        command = [sys.executable, str(EXAMPLE / "dataset.py"), "--out", str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = folder / f"run-{len(list(folder.iterdir()))}"
    places = (f"data.train={data / 'train'}", f"data.validation={data / 'validation'}", f"run.folder={run}")
    command = [sys.executable, "-m", "diffusionpipe", "train", str(EXAMPLE / "recipe.toml"), "--ranks", "1"]
    subprocess.run(
        [*command, *ONE_PROCESS, *places, f"training.steps={steps}", *overrides], check=True, stdout=subprocess.DEVNULL
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def reached(found: dict[int, float], loss: float) -> int | None:
    """The first validation at which the loss is as small; None: at none."""
    return next((step for step, value in sorted(found.items()) if value <= loss), None)


def numbers_of_steps(wanted: torch.Tensor, *, in_pairs: bool) -> list[float]:
    """The uniform numbers that "speed" turns into these time steps, so that two runs validate at the same ones."""
    settings = ObjectiveSettings(time_sampling=TimeSampling.SPEED)
    objective = Objective(settings, scheduler_config(EXAMPLE / "model"))
    assert objective.speed is not None
    shares = torch.cat([torch.zeros(1, dtype=torch.float64), objective.speed.cumulative])
    middles = (shares[wanted] + shares[wanted + 1]) / 2
    return [float(share) for share in (middles / 2 if in_pairs else middles)]


def speed(folder: Path, steps: int) -> list[str]:
    """The lines about SpeeD."""
    recipe = load_recipe(EXAMPLE / "recipe.toml", [])
    objective = Objective(ObjectiveSettings(time_sampling=TimeSampling.SPEED), scheduler_config(EXAMPLE / "model"))
    assert objective.speed is not None
    wanted = torch.tensor([int(time * objective.num_timesteps) for time in recipe.validation.timesteps])
    plain = losses(folder, steps)
    final = plain[max(plain)]
    lines = [f"uniform times: loss {final:.5f} after {max(plain)} steps"]
    for in_pairs in (False, True):
        times = f"validation.timesteps={numbers_of_steps(wanted, in_pairs=in_pairs)}"
        pairs = f"objective.speed_pairs={str(in_pairs).lower()}"
        found = losses(folder, steps, "objective.time_sampling=speed", pairs, times)
        name = "speed in pairs" if in_pairs else "speed"
        lines.append(
            f"{name}: loss {found[max(found)]:.5f} after {max(found)} steps, {final:.5f} by {reached(found, final)}"
        )
    return [*lines, f"m = {objective.speed.turn} of {objective.num_timesteps} steps of the schedule"]


RECIPES = {"speed": speed}


def main() -> None:
    """Print the lines of a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    with TemporaryDirectory(prefix="diffusionpipe-recipes-") as folder:
        print(*RECIPES[chosen.recipe](Path(folder), chosen.steps), sep="\n")


if __name__ == "__main__":
    main()

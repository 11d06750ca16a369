"""SpeeD: times that are nearly noise are drawn less often."""

from pathlib import Path

import torch

from benchmarks.recipes.digits import EXAMPLE, losses, reached
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, TimeSampling
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.recipe import load_recipe


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

"""Recorded trainings, run by today's code."""

from pathlib import Path
from tempfile import mkdtemp

from golden.double import train_in_double
from golden.recipes import TRAININGS, recipe_of
from kit.crew import Crew
from kit.tiny_runs import losses_of, train

from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined


def run_training(name: str, precision: str, place: Path, crew: Crew | None) -> list[float]:
    """The losses of a training, on the ranks of a crew or as the only rank; models and data are in `place`."""
    training = TRAININGS[name]
    folder = Path(mkdtemp(dir=place))
    recipe = recipe_of(
        training, precision, model=str(place / training.kind), data=str(place / "data"), folder=str(folder)
    )
    run = train_in_double if precision == "float64" else train
    if crew is None:
        with joined(membership({}), device="cpu") as job:
            run(job, recipe)
    for result in crew.run(run, recipe) if crew else ():
        if isinstance(result, Exception):
            raise result
    return list(losses_of(folder).values())
